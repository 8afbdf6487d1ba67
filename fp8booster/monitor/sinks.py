"""Outputs of recorded lines: a file of JSON lines, TensorBoard, or a user's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from fp8booster.files import write_whole
from fp8booster.monitor.scales import ScaleRow
from fp8booster.reading import parse_line, parse_record, read_text

KIND = "scales"
FILE = "scales.jsonl"

_REMEDY = "put it right, or move the file away: recording then begins a new one"


class Held(NamedTuple):
    """Holds what a sink has of a run that is resumed."""

    rows: Sequence[ScaleRow]
    """The lines of steps that are done."""
    since: int
    """The step after which the watchdog's thresholds were those of now."""


class Sink(Protocol):
    """Takes lines on rank 0."""

    def begin(self, header: dict[str, Any], done: int) -> Held | None:
        """Begin, once, before anything is written.

        Args:
            header: {"fp8booster": version, "kind": "scales", "every": N, "config": {...}, "layers": {"fp8": n, ...},
                "watchdog": thresholds}.
            done: steps that are taken already; lines of later ones are of a branch that was left.

        Returns:
            What it holds of them, if anything; the watchdog goes on from there.
        """

    def write(self, rows: Sequence[ScaleRow]) -> None:
        """Take all tensors of one sampled step."""

    def close(self) -> None:
        """End, once, after everything is written."""


class JsonLines:
    """A file with the header in its first line and then one line for each tensor and sampled step.

    Args:
        path: continued where it is there, without the lines of steps that are not done.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def begin(self, header: dict[str, Any], done: int) -> Held:
        """Begin as `Sink.begin`; the header is that of the last run that wrote here, with `Held.since`.

        Raises:
            ValueError: the file that is there is another.
            OSError: it cannot be written.
        """
        rows: list[ScaleRow] = []
        since = done
        if self.path.exists():
            if done:
                former, lines = read_scales(self.path)
                rows = [row for row in lines if row.step <= done]
                if former.get("watchdog") == header.get("watchdog"):
                    since = former.get("since", done)
            else:
                # a file of another kind must not be replaced
                _header(read_text(self.path, _REMEDY).split("\n")[:1], self.path)
        # checked before anything is made, so a wrong path leaves nothing behind
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # a run that resumes from before takes the later steps again
        kept = [_line(dataclasses.asdict(row)) for row in rows]
        # whole or not at all: a kill here must not cost the lines of all steps before
        write_whole(self.path, "".join([_line(header | {"since": since}), *kept]))
        self._stream = self.path.open("a", encoding="utf-8")
        return Held(rows, since)

    def write(self, rows: Sequence[ScaleRow]) -> None:
        """As `Sink.write`; the step is on its way to the disk when it returns."""
        self._stream.write("".join(_line(dataclasses.asdict(row)) for row in rows))
        # a run that is killed keeps the lines of all steps before
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class TensorBoard:
    """Scalars named role/figure/layer.

    Args:
        folder: of the event files.
    """

    FIGURES = ("amax", "scale", "flushed", "saturated", "snr_db", "non_finite", "outlier", "kurtosis")

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def begin(self, header: dict[str, Any], done: int) -> None:
        # here, for other sinks need no tensorboard
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard would show the steps of a branch that was left as well
        self._board = SummaryWriter(str(self.folder), purge_step=done + 1)
        self._board.add_text(KIND, json.dumps(header))

    def write(self, rows: Sequence[ScaleRow]) -> None:
        for row in rows:
            for figure in self.FIGURES:
                value = getattr(row, figure)
                if value is not None:
                    self._board.add_scalar(f"{row.role}/{figure}/{row.layer}", value, row.step)

    def close(self) -> None:
        self._board.close()


def sinks_of(given: str | Path | Sink | Sequence[Sink] | None) -> list[Sink]:
    """Return the sinks that a user gave; a path is a file of JSON lines.

    Raises:
        TypeError: it is no sink.
    """
    if given is None:
        return []
    if isinstance(given, str | Path):
        return [JsonLines(given)]
    sinks: list[Sink] = [*cast(Sequence[Sink], given)] if isinstance(given, Sequence) else [given]
    for sink in sinks:
        if not all(callable(getattr(sink, name, None)) for name in ("begin", "write", "close")):
            raise TypeError(
                f"{sink!r} is no sink: give a path for JSON lines, or objects with begin, write and close "
                "(fp8booster.monitor.sinks.Sink)"
            )
    return sinks


def read_scales(path: str | Path) -> tuple[dict[str, Any], list[ScaleRow]]:
    """Return the header and the lines of a file, without a last line that a kill cut short.

    Raises:
        ValueError: a line is none of them; the sentence names it.
        OSError: the file cannot be read.
    """
    # a whole line ends with a newline, so what follows the last one was cut short
    lines = read_text(Path(path), _REMEDY).split("\n")[:-1]
    header = _header(lines, path)
    rows = enumerate(lines[1:], 2)
    return header, [parse_line(line, f"Line {number} of {path}", ScaleRow, _REMEDY) for number, line in rows]


def _header(lines: Sequence[str], path: str | Path) -> dict[str, Any]:
    """Return the first line of a file. Raises ValueError for a file of another kind."""
    if not lines:
        raise ValueError(f"{path} is empty, without the line that tells what it is; {_REMEDY}.")
    name = f"Line 1 of {path}"
    header = parse_record(lines[0], name, {"kind": str, "every": int, "config": dict, "layers": dict}, _REMEDY)
    if header["kind"] != KIND:
        raise ValueError(f"{path} is a file of {header['kind']!r} and not of {KIND!r}; give {FILE} of a run.")
    return header


def _line(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"

"""One run of a campaign: its folder, which says how far it came and what it found.

    job.json        engine and job
    losses.jsonl    the losses, a line every few steps, some with losses on other text; at last, how it ended
    scales.jsonl    what FP8 does to each tensor, where that is recorded
    checkpoints/    where it goes on; removed when it has ended
    rank-0.log      what its processes print
    stop            asks its processes to save and end

A run that has ended needs its first three files alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from filelock import FileLock, Timeout

from benchmarks.training.job import Job
from benchmarks.training.variants import Variant
from fp8booster.checkpoints import named_step, newest_checkpoint
from fp8booster.files import write_whole
from fp8booster.monitor.sinks import FILE
from fp8booster.reading import first_of

HELD_OUT, NOT_FINITE = "held out", "not finite"
"""How a run ends: with the loss on what it has not trained on, or where its loss was not finite."""

Point = tuple[int, float, float]
"""Tokens that were trained on, the loss on a text, and its standard error over the text."""


class RunFolder:
    """The files that a run has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.scales = path / FILE
        self.stop = path / "stop"
        self._record = path / "losses.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other commands out of it.

        Raises:
            ValueError: another is in it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            # not to wait: who waited for the other would train what that one has trained
            with FileLock(self.path / ".lock", blocking=False):
                yield
        except Timeout:
            raise ValueError(
                f"another command is training in {self.path}; wait for it, or give another --runs"
            ) from None

    def claim(self, engine: str, job: Job, ranks: int) -> None:
        """Write what the run is, or see that the folder is of this run.

        Raises:
            ValueError: another run was begun there, or the run has ended without a loss for each step.
        """
        # texts by what they are, wherever their files lie
        texts = {
            "tokens": None if job.tokens is None else job.tokens.identity,
            "kinds": [[name, tokens.identity] for name, tokens in job.kinds],
        }
        text = json.dumps({"engine": engine, "ranks": ranks, **job.as_record(), **texts}, indent=1) + "\n"
        file = self.path / "job.json"
        if file.exists():
            asked, there = json.loads(text), _parsed(file.read_bytes(), str(file))
            differing = [name for name in asked | there if asked.get(name) != there.get(name)]
            if differing:
                raise ValueError(
                    f"{self.path} holds a run that differs in {first_of(differing, shown=5)}; give another --runs, or "
                    f"the options in {file.name} there"
                )
        else:
            write_whole(file, text)
        if (end := self.end()) is not None and end["end"] == HELD_OUT:
            self._require_losses(self.lines(), job.steps)

    def lines(self) -> list[dict[str, Any]]:
        """Its record; without the last line, where a kill has cut that.

        Raises:
            ValueError: another line is broken.
        """
        if not self._record.exists():
            return []
        whole = [line for line in self._record.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        return [_parsed(line, f"{self._record}, line {number},") for number, line in enumerate(whole, 1)]

    def _require_losses(self, lines: Sequence[dict[str, Any]], steps: int) -> None:
        """Raise ValueError unless lines of the record have one loss for each of so many steps, in order."""
        done = 0
        for line in lines:
            done += len(line.get("losses", ()))
            if line.get("step", done) != done:
                break
        else:
            if done == steps:
                return
        raise ValueError(
            f"{self._record} does not have one loss for each of {steps} steps; remove {self.path} to train it again"
        )

    def append(self, **line: Any) -> None:
        """Write one line."""
        with self._record.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def sync(self) -> None:
        """Return when the record is on the disk."""
        with self._record.open("rb") as stream:
            os.fsync(stream.fileno())

    def cut(self, step: int) -> None:
        """Forget the steps after one from which the run goes on.

        Raises:
            ValueError: the record has not one loss for each step before.
        """
        kept = [line for line in self.lines() if line.get("step", step + 1) <= step]
        self._require_losses(kept, step)
        write_whole(self._record, "".join(json.dumps(line) + "\n" for line in kept))

    def losses(self) -> list[float]:
        """The losses of every step so far."""
        return [loss for line in self.lines() for loss in line.get("losses", ())]

    @property
    def resumes_at(self) -> int:
        """The step of the checkpoint from which it goes on; 0 where there is none."""
        checkpoint = newest_checkpoint(self.checkpoints)
        return 0 if checkpoint is None else named_step(checkpoint)

    def speed(self, since: int = 0) -> float | None:
        """The median tokens/s of the lines after a step, without evaluations; None where there are none."""
        timed = [line for line in self.lines() if line.get("step", 0) > since]
        return median(line["tokens"] / line["seconds"] for line in timed) if timed else None

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of its checkpoints on the disk."""
        return sum(path.stat().st_size for path in self.checkpoints.rglob("*") if path.is_file())

    def curves(self) -> dict[str, list[Point]]:
        """The evaluations so far, by the name of the text."""
        found: dict[str, list[Point]] = {}
        tokens = 0
        for line in self.lines():
            tokens += line.get("tokens", 0)
            texts = line.get("texts", {})
            if line.get("end") == HELD_OUT:
                texts = {HELD_OUT: line["held_out"], **line["kinds"]}
            for text, loss in texts.items():
                found.setdefault(text, []).append((tokens, loss["own"], loss["error"]))
        return found

    def end(self) -> dict[str, Any] | None:
        """The line that says how it ended; None of a run that has not."""
        return next((line for line in self.lines() if "end" in line), None)

    def finish(self, end: str, **facts: Any) -> None:
        """Write how it ended; it is not gone on with."""
        self.append(end=end, **facts)
        self.sync()  # before what it could have gone on from is gone
        shutil.rmtree(self.checkpoints, ignore_errors=True)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is broken: {error}; remove the run's folder to train it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} is broken: it is no object; remove the run's folder to train it again")
    return found


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    seed: int
    variant: Variant
    job: Job
    folder: RunFolder

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {self.variant.label}"

    @classmethod
    def of(cls, root: Path, variants: Sequence[Variant], seeds: Sequence[int], job: Job) -> list[Run]:
        """All of a campaign, one seed after the other; each in a folder of its own."""
        return [
            cls(seed, variant, variant.job(job, seed), RunFolder(root / f"seed-{seed}" / variant.key))
            for seed in seeds
            for variant in variants
        ]

"""The record of a run in its folder: a line of figures for each step, and at its end those of each precision."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.files import write_whole
from fp8booster.reading import Kind, first_of, parse_line, read_record, read_text, require_fields, require_rows

LAST = 0.05
"""Share of the steps whose mean is the final loss."""

REMOVE = "remove the file; --resume of the run writes it anew"
"""Remedy for a damaged file about a run."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Figures of one optimizer step. Memory and bytes are those of rank 0."""

    step: int
    loss: float  # mean over micro-batches and ranks
    lr: float
    grad_norm: float  # before clipping
    tokens_per_second: float  # of all ranks together
    seconds: float
    peak_memory: int  # bytes: the most allocated on the GPU, or the process's largest resident set on CPU
    wire_bytes: int  # bytes sent in this step (monitor.traffic)


_REMEDY = "put it right, or move the file away: the run's curve begins anew then"


class MetricsLog:
    """Writes `metrics.jsonl` and `tensorboard/` in a folder."""

    def __init__(self, folder: Path, done: int) -> None:
        """Drop the lines of steps after `done`, which a former run may have left."""
        # here, for commands that only read a run need no tensorboard
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        if path.exists():
            # whole: a kill here must not cost the curve of all steps before
            write_whole(path, "".join(_line(each) for each in read_metrics(path) if each.step <= done))
        # line by line, so that a kill loses the step at hand alone
        self._stream = path.open("a", buffering=1)
        # TensorBoard would show the steps of a branch that was left as well
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def write(self, metrics: StepMetrics) -> None:
        self._stream.write(_line(metrics))
        for name, value in dataclasses.asdict(metrics).items():
            if name != "step":
                self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._stream.close()
        self._board.close()


def _line(metrics: StepMetrics) -> str:
    return json.dumps(dataclasses.asdict(metrics)) + "\n"


def read_metrics(path: Path) -> list[StepMetrics]:
    """Read the lines of a `metrics.jsonl`, but for a last one that a kill cut short."""
    # a whole line ends with a newline, so the rest was cut short
    lines = read_text(path, _REMEDY).split("\n")[:-1]
    return [parse_line(line, f"Line {number} of {path}", StepMetrics, _REMEDY) for number, line in enumerate(lines, 1)]


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """Figures of a run in one precision."""

    precision: str
    steps: int
    final_loss: float  # mean over the last twentieth of the steps
    tokens_per_second: float  # of all ranks together, at the median step
    step_seconds: float  # median
    peak_memory: int  # bytes, the most on one rank
    step_bytes: int  # bytes that rank 0 sends in the median step
    parameters: int
    world_size: int
    layers: tuple[dict[str, Any], ...]  # rows of `fp8booster.report`
    others: tuple[dict[str, Any], ...]  # its rows of parameters outside of linear layers, as experts in one parameter
    traffic: tuple[dict[str, Any], ...]  # rows of `monitor.traffic.Traffic`
    model_flops: float | None = None  # a second of one GPU, at the median step; None where its limit is not known
    clock_mhz: float | None = None  # of its processors
    peak_share: float | None = None  # model FLOP/s over the FP8 peak at this clock
    reachable_share: float | None = None  # and over what the run's products reach at measured rates


def count_fp8(rows: Sequence[Mapping[str, Any]]) -> int:
    """Count the layers, or parameters, in FP8 in rows of `fp8booster.report`."""
    return sum(row["precision"] == "FP8" for row in rows)


def not_in_fp8(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the layers, or parameters, that are not in FP8, a line for each reason."""
    names: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["precision"] != "FP8":
            names[row["notes"]].append(row["name"])
    return [f"{first_of(layers, shown=4)} ({reason})" for reason, layers in names.items()]


_ROW: dict[str, Kind] = {"name": str, "precision": str, "notes": str}
_LIMIT: dict[str, Kind] = dict.fromkeys(("flops_per_token", "clock_mhz", "peak_flops"), float)
_LIMIT["reachable_flops"] = (float, type(None))


def read_result(path: Path, fields: Mapping[str, Kind]) -> dict[str, Any]:
    """Read a run's `result.json`; errors as `read_record`, for rows of layers that are none too."""
    # another version may have written the file, or a hand changed it
    result = read_record(path, fields, REMOVE)
    result = {"limit": None, "others": [], **result}  # which older versions did not know
    require_fields(result, str(path), {"others": list}, REMOVE)
    for name in ("layers", "others"):
        require_rows(result[name], f"'{name}' in {path}", _ROW, REMOVE)
    if result["limit"] is not None:
        require_rows([result["limit"]], f"'limit' in {path}", _LIMIT, REMOVE)
        if any(result["limit"][name] in (0, math.inf) for name in ("peak_flops", "reachable_flops")):
            raise ValueError(f"'limit' in {path} has a rate that no GPU has; {REMOVE}.")
    return result


def read_figures(folder: Path, precision: str) -> tuple[RunFigures, list[StepMetrics]]:
    """Read the figures and the metrics of a finished run in `folder`/`precision`.

    Raises:
        ValueError: it has taken no step.
    """
    metrics = read_metrics(folder / precision / "metrics.jsonl")
    if not metrics:
        raise ValueError(
            f"{folder / precision / 'metrics.jsonl'} has no step: with --on-nonfinite skip, all may have been "
            "skipped. Look at the data, and train again with a lower --lr and another --out."
        )
    fields: dict[str, Kind] = {"layers": list, "traffic": list}
    fields |= dict.fromkeys(("world_size", "peak_memory", "parameters"), int)
    result = read_result(folder / precision / "result.json", fields)
    last = metrics[-max(1, round(len(metrics) * LAST)) :]
    # medians: the first step compiles kernels and asks for its memory
    tokens_per_second = statistics.median(step.tokens_per_second for step in metrics)
    figures = RunFigures(
        precision=precision,
        steps=metrics[-1].step,
        final_loss=statistics.fmean(step.loss for step in last),
        tokens_per_second=tokens_per_second,
        step_seconds=statistics.median(step.seconds for step in metrics),
        peak_memory=result["peak_memory"],
        step_bytes=round(statistics.median(step.wire_bytes for step in metrics)),
        parameters=result["parameters"],
        world_size=result["world_size"],
        layers=tuple(result["layers"]),
        others=tuple(result["others"]),
        traffic=tuple(result["traffic"]),
        **_limited(result["limit"], tokens_per_second / result["world_size"]),
    )
    return figures, metrics


def _limited(limit: Mapping[str, Any] | None, tokens_per_second: float) -> dict[str, float | None]:
    """Return the figures of `RunFigures` that compare tokens a second of one GPU with its limit, where that is known.

    Args:
        limit: as `result.json` has it.
        tokens_per_second: of one GPU.
    """
    if limit is None:
        return {}
    flops = tokens_per_second * limit["flops_per_token"]
    reachable = limit["reachable_flops"]
    return {
        "model_flops": flops,
        "clock_mhz": limit["clock_mhz"],
        "peak_share": flops / limit["peak_flops"],
        "reachable_share": None if reachable is None else flops / reachable,
    }


def finite_or_null(value: Any) -> Any:
    """Return the value; None, which is JSON's null, for a number that is infinite or NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

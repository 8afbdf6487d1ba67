"""One line of figures for each step, kept as JSON lines and as TensorBoard scalars."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import get_type_hints

from fp8booster.files import write_whole
from fp8booster.reading import parse_record, read_text, require_known


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """What one optimizer step showed. Memory and bytes are those of rank 0."""

    step: int
    loss: float
    """Mean over micro-batches and ranks."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens_per_second: float
    """Of all ranks together."""
    seconds: float
    peak_memory: int
    """Bytes: the most allocated on the GPU, or the process's largest resident set on CPU."""
    wire_bytes: int
    """Bytes sent in this step (monitor.traffic)."""


_FIELDS = get_type_hints(StepMetrics)
_REMEDY = "put it right, or move the file away: the run's curve begins anew then"


class MetricsLog:
    """Writes `metrics.jsonl` and `tensorboard/` in a folder."""

    def __init__(self, folder: Path, done: int) -> None:
        """Lines of steps after `done`, which a former run may have left, are dropped."""
        from torch.utils.tensorboard import SummaryWriter

        path = folder / "metrics.jsonl"
        if path.exists():
            write_whole(path, "".join(_line(each) for each in read_metrics(path) if each.step <= done))
        self._stream = path.open("a", buffering=1)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def write(self, metrics: StepMetrics) -> None:
        self._stream.write(_line(metrics))
        for name, value in dataclasses.asdict(metrics).items():
            if name != "step":
                self._board.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._stream.close()
        self._board.close()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The lines of a `metrics.jsonl`, a last one that a kill cut short left out."""
    lines = read_text(path, _REMEDY).split("\n")
    return [_metrics(line, f"Line {number} of {path}") for number, line in enumerate(lines[:-1], 1)]


def _metrics(line: str, name: str) -> StepMetrics:
    values = parse_record(line, name, _FIELDS, _REMEDY)
    require_known(values, name, _FIELDS)
    return StepMetrics(**values)


def _line(metrics: StepMetrics) -> str:
    return json.dumps(dataclasses.asdict(metrics)) + "\n"

"""What a finished run's folder says of each precision: figures for tables, and which layers are in FP8."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.cli.metrics import StepMetrics, read_metrics
from fp8booster.listing import first_of
from fp8booster.reading import Kind, read_record, require_rows

LAST = 0.05
"""Share of the steps whose mean is the final loss."""

_NAMED = 4  # layers that a line names
REMOVE = "remove the file; --resume of the run writes it anew"
"""What to do about a file that tells of a run and is wrong."""

_LAYER: dict[str, Kind] = {"name": str, "precision": str, "notes": str}
_RESULT: dict[str, Kind] = {"world_size": int, "peak_memory": int, "parameters": int, "layers": list, "traffic": list}


@dataclass(frozen=True, kw_only=True)
class RunFigures:
    """One precision's figures."""

    precision: str
    steps: int
    final_loss: float
    """Mean over the last twentieth of the steps."""
    tokens_per_second: float
    """Of all ranks together, at the median step."""
    step_seconds: float
    """Median."""
    peak_memory: int
    """Bytes, the most on one rank."""
    step_bytes: int
    """Bytes that rank 0 sends in the median step."""
    parameters: int
    world_size: int
    layers: tuple[dict[str, Any], ...]
    """Rows of `fp8booster.report`."""
    traffic: tuple[dict[str, Any], ...]
    """Rows of `monitor.traffic.Traffic`."""

    @property
    def fp8_layers(self) -> int:
        return sum(row["precision"] == "FP8" for row in self.layers)

    @property
    def other_layers(self) -> list[str]:
        """The layers that are not in FP8, those with one reason together."""
        names: dict[str, list[str]] = defaultdict(list)
        for row in self.layers:
            if row["precision"] != "FP8":
                names[row["notes"]].append(row["name"])
        return [f"{first_of(layers, _NAMED)} ({reason})" for reason, layers in names.items()]


def read_result(path: Path, fields: Mapping[str, Kind]) -> dict[str, Any]:
    """Return a run's `result.json`; errors as `read_record`, for rows of layers that are none too."""
    result = read_record(path, fields, REMOVE)
    require_rows(result["layers"], f"'layers' in {path}", _LAYER, REMOVE)
    return result


def read_figures(folder: Path, precision: str) -> tuple[RunFigures, list[StepMetrics]]:
    """The figures and the metrics of a finished run in `folder`/`precision`.

    Raises:
        ValueError: it has taken no step.
    """
    metrics = read_metrics(folder / precision / "metrics.jsonl")
    if not metrics:
        raise ValueError(
            f"{folder / precision / 'metrics.jsonl'} has no step: with --on-nonfinite skip, all may have been left "
            "out. Look at the data, and train anew with a lower --lr and another --out."
        )
    result = read_result(folder / precision / "result.json", _RESULT)
    last = metrics[-max(1, round(len(metrics) * LAST)) :]
    column = RunFigures(
        precision=precision,
        steps=metrics[-1].step,
        final_loss=statistics.fmean(step.loss for step in last),
        tokens_per_second=statistics.median(step.tokens_per_second for step in metrics),
        step_seconds=statistics.median(step.seconds for step in metrics),
        peak_memory=result["peak_memory"],
        step_bytes=round(statistics.median(step.wire_bytes for step in metrics)),
        parameters=result["parameters"],
        world_size=result["world_size"],
        layers=tuple(result["layers"]),
        traffic=tuple(result["traffic"]),
    )
    return column, metrics

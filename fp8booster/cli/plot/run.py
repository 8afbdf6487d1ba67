"""What a run's folder holds for a page: losses, scales, which layers are in FP8, options."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.cli.figures import read_result
from fp8booster.cli.json_values import finite_or_null
from fp8booster.cli.metrics import read_metrics
from fp8booster.listing import first_of
from fp8booster.monitor.sinks import FILE
from fp8booster.reading import read_record

from .advice import Advice, Worst, advise, worst_first
from .scales import Scales, scales_of

_NAMED = 4  # layers that a line names
PRECISIONS = ("bf16", "fp8")
PAGE = "page.html"
"""In a run's folder."""

Losses = Mapping[int, float]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run."""

    folder: Path
    about: dict[str, Any]
    """`run.json`, where `fp8booster train` wrote one: its command, machine and options."""
    losses: dict[str, Losses]
    """By precision, then by step."""
    scales: Scales | None
    layers: list[dict[str, Any]] | None
    """Rows of `fp8booster.report` of the FP8 run, where it has ended."""
    worst: list[Worst]
    advice: list[Advice]

    @property
    def in_fp8(self) -> str | None:
        """How many layers are in FP8."""
        if self.layers is not None:
            return f"{sum(row['precision'] == 'FP8' for row in self.layers)} of {len(self.layers)}"
        counts = self.scales.about.get("layers") if self.scales else None
        return ", ".join(f"{name}: {count}" for name, count in counts.items()) if isinstance(counts, dict) else None

    @property
    def not_in_fp8(self) -> list[str]:
        """The others, those of one reason together."""
        names: dict[str, list[str]] = defaultdict(list)
        for row in self.layers or ():
            if row["precision"] != "FP8":
                names[row["notes"]].append(row["name"])
        return [f"{first_of(layers, _NAMED)}: {reason}" for reason, layers in names.items()]

    @property
    def suggestion(self) -> list[str]:
        """What to train with instead, in lines.

        Raises:
            ValueError: the run recorded nothing to tell it from.
        """
        if self.scales is None or not self.scales.tensors:
            raise ValueError(f"{self.folder} has recorded no tensors; train it with --record 50 to have a suggestion.")
        if not self.advice:
            samples = len({int(step) for tensor in self.scales.tensors for step in tensor.steps})
            return [f"Keep the recipe: {len(self.scales.tensors)} tensors in {samples} samples ask for no other."]
        return ["Change one at a time, the first one first:", *(each.line for each in self.advice)]

    def as_record(self) -> dict[str, Any]:
        """For scripts; numbers that are not finite are null."""
        return {
            "run": str(self.folder),
            "steps": {name: max(losses, default=0) for name, losses in self.losses.items()},
            "last_loss": {name: finite_or_null(losses[max(losses)]) for name, losses in self.losses.items() if losses},
            "in_fp8": self.in_fp8,
            "not_in_fp8": self.not_in_fp8,
            "worst": [
                {name: finite_or_null(value) for name, value in dataclasses.asdict(each).items()} for each in self.worst
            ],
            "advice": [dataclasses.asdict(each) for each in self.advice],
        }


def has_scales(folder: Path) -> bool:
    """Whether a run recorded scales."""
    return _scales_file(folder) is not None


def _scales_file(folder: Path) -> Path | None:
    places = (folder, *(folder / name for name in reversed(PRECISIONS)))
    return next((file for place in places if (file := place / FILE).exists()), None)


def read_run(folder: Path) -> RunRecord:
    """What a folder of `fp8booster train`, or one with a `metrics.jsonl` or a `scales.jsonl` of its own, holds.

    Raises:
        ValueError: it holds none of them, or one is damaged.
        OSError: a file cannot be read.
    """
    parts = [part for name in PRECISIONS if (part := folder / name).is_dir()] or [folder]
    losses = {
        part.name: {each.step: each.loss for each in read_metrics(file)}
        for part in parts
        if (file := part / "metrics.jsonl").exists()
    }
    file = _scales_file(folder)
    if not losses and file is None:
        raise ValueError(
            f"{folder} has neither losses (metrics.jsonl) nor scales ({FILE}); give the folder of a run, as "
            "`fp8booster train --out` names it."
        )
    scales = scales_of(file) if file else None
    result, run = parts[-1] / "result.json", folder / "run.json"
    layers = read_result(result, {"layers": list})["layers"] if result.exists() else None
    worst = worst_first(scales) if scales else []
    return RunRecord(
        folder=folder,
        about=read_record(run, {}, "put it right, or move it away") if run.exists() else {},
        losses=losses,
        scales=scales,
        layers=layers,
        worst=worst,
        advice=advise(scales, worst) if scales else [],
    )

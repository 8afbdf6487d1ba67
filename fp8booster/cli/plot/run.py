"""The folder of a run as a page shows it: losses, scales, layers in FP8, options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.cli.metrics import count_fp8, finite_or_null, not_in_fp8, read_metrics, read_result
from fp8booster.monitor.sinks import FILE
from fp8booster.reading import read_record

from .advice import Advice, Scales, Worst, advise, scales_of, worst_first

PRECISIONS = ("bf16", "fp8")
PAGE = "page.html"
"""In a run's folder."""

Losses = Mapping[int, float]


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run."""

    folder: Path
    about: dict[str, Any]  # `run.json`, where `fp8booster train` wrote one: its command, machine and options
    losses: dict[str, Losses]  # by precision, then by step
    scales: Scales | None
    layers: list[dict[str, Any]] | None  # rows of `fp8booster.report` of the FP8 run, where it has ended
    others: list[dict[str, Any]]  # and its rows of parameters outside of linear layers
    worst: list[Worst]
    advice: list[Advice]

    @property
    def in_fp8(self) -> str | None:
        """Count the layers in FP8, in words; None where the record does not tell."""
        if self.layers is not None:
            others = f", and {count_fp8(self.others)} of {len(self.others)} other weights" if self.others else ""
            return f"{count_fp8(self.layers)} of {len(self.layers)}{others}"
        counts = self.scales.about.get("layers") if self.scales else None
        return ", ".join(f"{name}: {count}" for name, count in counts.items()) if isinstance(counts, dict) else None

    @property
    def not_in_fp8(self) -> list[str]:
        """Name the layers and others that are not in FP8, a line for each reason."""
        return not_in_fp8([*(self.layers or ()), *self.others])

    @property
    def suggestion(self) -> list[str]:
        """Return what to train with instead, in lines. Raises ValueError for a run that recorded no tensors."""
        if self.scales is None or not self.scales.tensors:
            raise ValueError(f"{self.folder} has recorded no tensors; train it with --record 50 to have a suggestion.")
        if not self.advice:
            tensors, samples = len(self.scales.tensors), self.scales.samples
            return [f"Keep the recipe: {tensors} tensors in {samples} samples ask for no other."]
        return ["Change one at a time, the first one first:", *(each.line for each in self.advice)]

    def as_record(self) -> dict[str, Any]:
        """Return the record for scripts; numbers that are not finite are null."""
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


def scales_file(folder: Path) -> Path | None:
    """Return the file of the scales that a run recorded; None where it recorded none."""
    places = (folder, *(folder / name for name in reversed(PRECISIONS)))
    return next((file for place in places if (file := place / FILE).exists()), None)


def read_run(folder: Path) -> RunRecord:
    """Read a folder of `fp8booster train`, or one with a `metrics.jsonl` or a `scales.jsonl` of its own.

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
    file = scales_file(folder)
    if not losses and file is None:
        raise ValueError(
            f"{folder} has neither losses (metrics.jsonl) nor scales ({FILE}); give the folder of a run, as "
            "`fp8booster train --out` names it."
        )
    scales = scales_of(file) if file else None
    result, run = parts[-1] / "result.json", folder / "run.json"
    found = read_result(result, {"layers": list}) if result.exists() else {"layers": None, "others": []}
    worst = worst_first(scales) if scales else []
    return RunRecord(
        folder=folder,
        about=read_record(run, {}, "put it right, or move it away") if run.exists() else {},
        losses=losses,
        scales=scales,
        layers=found["layers"],
        others=found["others"],
        worst=worst,
        advice=advise(scales, worst) if scales else [],
    )

"""Runs of `fp8booster train` that differ in how gradients are sent."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.harness.results import Record
from fp8booster.cli.metrics import read_metrics
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.run import run

SETTINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "16 bits": {"plugin_options": ("fp8_communication=false",)},
    'FP8, gradient_scaling="block"': {"fp8_options": ("messages.block_size=256",)},
    'FP8, gradient_scaling="tensor"': {"fp8_options": ("messages.block_size=None",)},
    'FP8, gradient_scaling="auto"': {"fp8_options": ("messages.automatic_scaling=true",)},
}
"""The first sends weights in 16 bits too; the others send both in FP8."""


def learn(setting: str, options: TrainOptions) -> Record:
    """Train once; the losses of all steps and the mean of the last tenth."""
    given = dataclasses.asdict(options) | {"precision": "fp8", "progress": "none"} | SETTINGS[setting]
    with TemporaryDirectory() as folder:
        if run(given | {"out": folder}, None, f"fp8booster train, {setting}"):
            raise RuntimeError(f"the run with {setting} was stopped")
        losses = [metrics.loss for metrics in read_metrics(Path(folder) / "fp8" / "metrics.jsonl")]
    return {"setting": setting, "final": statistics.fmean(losses[-max(1, len(losses) // 10) :]), "losses": losses}

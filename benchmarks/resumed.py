"""Tell whether a resumed run of `fp8booster train` repeats the uninterrupted one bit for bit.

    python -m benchmarks.resumed runs/whole/fp8 runs/resumed/fp8 --json resumed.json

Compares loss, gradient norm and learning rate of every step that the resumed run took, then the FP32 master weights and
the BF16 weights of the last checkpoint. Exit status 1 if anything differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors.torch import load_file

from benchmarks.harness.command import JsonFile, run_command
from fp8booster.checkpoints import newest_checkpoint
from fp8booster.cli.metrics import read_metrics

Run = Annotated[Path, typer.Argument(help="A run's folder of one precision, as runs/whole/fp8.")]

_REPEATED = ("step", "loss", "grad_norm", "lr")


def main(whole: Run, resumed: Run, json_file: JsonFile = None) -> None:
    """Compare a resumed run with the uninterrupted one."""
    steps = read_metrics(resumed / "metrics.jsonl")
    was = {metrics.step: metrics for metrics in read_metrics(whole / "metrics.jsonl")}
    different = [
        metrics.step
        for metrics in steps
        if any(getattr(metrics, name) != getattr(was[metrics.step], name) for name in _REPEATED)
    ]
    checkpoint = newest_checkpoint(whole / "checkpoints")
    weights = dict(_tensors(checkpoint))
    others = dict(_tensors(resumed / "checkpoints" / checkpoint.name))
    changed = [name for name in weights if name not in others or not torch.equal(weights[name], others[name])]
    found = {
        "first step": steps[0].step,
        "last step": steps[-1].step,
        "steps that differ": different,
        "last loss": [was[steps[-1].step].loss, steps[-1].loss],
        "checkpoint": checkpoint.name,
        "tensors compared": len(weights),
        "values compared": sum(tensor.numel() for tensor in weights.values()),
        "tensors that differ": changed,
    }
    text = json.dumps(found, indent=1)
    if json_file is not None:
        json_file.write_text(text + "\n")
    print(text)
    if different or changed:
        raise typer.Exit(1)


def _tensors(checkpoint: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for folder in ("masters", "model"):
        for file in sorted((checkpoint / folder).glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                yield f"{folder}/{file.name}/{name}", tensor


if __name__ == "__main__":
    run_command(main)

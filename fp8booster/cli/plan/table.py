"""A plan as a table for a terminal, and as a record for JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8booster.monitor.memory import ACTIVATIONS, GRADIENTS, TEMPORARY

from .configurations import GIB, RESERVED, Configuration, Gpu
from .parts import KEPT, MASTERS, MOMENTS, WEIGHTS

_HEADINGS = {
    WEIGHTS: "weight",
    KEPT: "FP8",
    MASTERS: "master",
    MOMENTS: "m, v",
    GRADIENTS: "grads",
    ACTIVATIONS: "activ.",
    TEMPORARY: "temp.",
}

_LEGEND = """weight: parameters as the model has them. FP8: FP8 weights, and buffers that stay.
m, v: moments. temp.: what a phase makes and frees."""


def show(plan: Sequence[Configuration], gpu: Gpu, console: Console) -> None:
    """Print what each configuration takes, what fits, and the command of the first that fits on `gpu`."""
    counted = [each for each in plan if each.peaks is not None]
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        title="GiB of the fullest rank, at the peak of a step",
    )
    table.add_column("", no_wrap=True)
    for heading in (*_HEADINGS.values(), "peak", "fits on"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in counted:
        sizes = [each.parts[part] for part in _HEADINGS] + [each.parts.total()]
        table.add_row(each.name, *(f"{size / GIB:.1f}" for size in sizes), each.fits_on or "none")
    console.print(table)
    console.print(_LEGEND, style="dim")
    for each in plan:
        if each.why_not is not None:
            console.print(f"{each.name} cannot be counted: {each.why_not}", soft_wrap=True)
    if not counted:
        return
    fitting = next((each for each in counted if each.precision == "fp8" and gpu.takes(each.parts.total())), None)
    if fitting is None:
        console.print(
            f"Nothing of this fits on {gpu.name}, with {RESERVED} of its {gpu.memory:.0f} GiB left free. Take more "
            "GPUs, --tp or --pp, or fewer tokens.",
            soft_wrap=True,
        )
    else:
        console.print(f"The first in FP8 that fits on {gpu.name}, with {RESERVED} GiB left free:", soft_wrap=True)
        console.print(f"  {shlex.join(fitting.command)}", soft_wrap=True, highlight=False)


def as_record(plan: Sequence[Configuration]) -> list[dict[str, Any]]:
    """For JSON: of each configuration its command, its bytes by part at the peak of each phase, and where it fits."""
    return [
        {
            "name": each.name,
            "precision": each.precision,
            "command": shlex.join(each.command),
            **({"why_not": each.why_not} if each.peaks is None else _sizes(each)),
        }
        for each in plan
    ]


def _sizes(configuration: Configuration) -> dict[str, Any]:
    assert configuration.peaks is not None  # asked of what was counted alone
    return {
        "peak_bytes": configuration.parts.total(),
        "fits_on": configuration.fits_on,
        "bytes_by_phase": {phase: dict(parts) for phase, parts in configuration.peaks.items()},
    }

"""The lines of `scales.jsonl` by tensor: what a run recorded of each that it cast to FP8."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import read_scales

NUMBERS = ("scale", "flushed", "saturated", "snr_db", "non_finite", "outlier")
"""Of `ScaleRow`, what a page shows."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of one layer, at each step that was sampled."""

    layer: str
    role: str
    format: str
    steps: np.ndarray
    values: dict[str, np.ndarray]
    """By the names in `NUMBERS`, one for each step; NaN for None."""


@dataclass(frozen=True, eq=False)
class Scales:
    """All that a file says."""

    about: dict[str, Any]
    """Its first line: "every", the steps between samples; "config"; "layers"."""
    tensors: tuple[Tensor, ...]
    """In the file's order."""

    @property
    def roles(self) -> tuple[str, ...]:
        """In the file's order."""
        return tuple(dict.fromkeys(tensor.role for tensor in self.tensors))


def scales_of(path: Path) -> Scales:
    """The content of a `scales.jsonl`.

    Raises:
        ValueError: it is none, or a line is damaged; the sentence names the line and what to do.
    """
    about, rows = read_scales(path)
    found: dict[tuple[str, str, str], dict[int, ScaleRow]] = {}
    for row in rows:
        found.setdefault((row.layer, row.role, row.format), {})[row.step] = row
    return Scales(
        about, tuple(_tensor(*key, [samples[step] for step in sorted(samples)]) for key, samples in found.items())
    )


def _tensor(layer: str, role: str, format: str, rows: list[ScaleRow]) -> Tensor:
    values = {
        name: np.array([math.nan if (value := getattr(row, name)) is None else value for row in rows], float)
        for name in NUMBERS
    }
    return Tensor(layer, role, format, np.array([row.step for row in rows]), values)

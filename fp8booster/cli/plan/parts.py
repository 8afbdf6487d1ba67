"""The parts of memory that stay from step to step; `monitor.memory` has those by lifetime."""

from __future__ import annotations

from collections import Counter

WEIGHTS, MASTERS, MOMENTS, KEPT = "weights", "master weights", "moments", "FP8 weights and buffers"

Footprint = dict[str, Counter[str]]
"""By phase of a step, the bytes of each part when most memory is held."""


def extended(one: Footprint, other: Footprint, times: float) -> Footprint:
    """Each size of `one`, and so many times what that of `other` is more."""
    return {
        phase: Counter(
            {part: round(sizes[part] + times * (other[phase][part] - sizes[part])) for part in {*sizes, *other[phase]}}
        )
        for phase, sizes in one.items()
    }

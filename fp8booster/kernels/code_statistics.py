"""What 8-bit codes that are no FP8 lose, of activations and of Adam's moments: of some values, evenly spaced."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.adam_step import AdamRates
from fp8booster.kernels.adamw_8bit import (
    INVERSE,
    decode_first,
    decode_second,
    in_blocks,
    left_blocks,
    master_of,
    next_moments,
)
from fp8booster.kernels.cast_statistics import statistics
from fp8booster.kernels.group_codes import GroupCodes, decode_groups
from fp8booster.kernels.moments import BLOCK, Moments8bit

MOST = 2**20
"""Less than twice as many values of a tensor are looked at."""


def activation_statistics(values: Tensor, codes: GroupCodes) -> tuple[int, Tensor]:
    """How many values were looked at, and what a matrix, [M, K], lost of them, as `cast_statistics.statistics`."""
    rows = slice(None, None, max(1, values.numel() // MOST))
    values = values[rows]
    return values.numel(), statistics(values, decode_groups(GroupCodes(codes.codes[rows], codes.amaxes[rows])))


class MomentSample:
    """Some blocks of a tensor's moments as a step makes them, before it rounds them; made before the step.

    Args:
        value, low, gradient, moments, row, rates: as `adamw_8bit.update_8bit` takes them.
    """

    def __init__(
        self, value: Tensor, low: Tensor | None, gradient: Tensor, moments: Moments8bit, row: Tensor, rates: AdamRates
    ) -> None:
        g = _some(gradient).float() * row[INVERSE]
        w = _some(value) if low is None else master_of(_some(value), _some(low).flatten()).view_as(g)
        left = left_blocks(g, row)[:, None]
        exact = next_moments(w, g, *_decoded(moments), row, rates)
        self._moments, self._exact = moments, [torch.where(left, torch.nan, each) for each in exact]

    def statistics(self) -> list[tuple[int, Tensor]]:
        """After the step, of the first and of the second moments, as `activation_statistics`; what the step has left
        as it was, since its gradient was not finite, counts as that.
        """
        rounded = _decoded(self._moments)
        return [(one.numel(), statistics(one, other)) for one, other in zip(self._exact, rounded, strict=True)]


def _decoded(moments: Moments8bit) -> tuple[Tensor, Tensor]:
    every = _every(moments.first)
    first = decode_first(_some(moments.first), moments.amaxes[::every][: _count(moments.first)])
    second = decode_second(_some(moments.second), moments.ranges[::every][: _count(moments.second)])
    return first, second


def _some(values: Tensor) -> Tensor:
    """Whole blocks of a tensor, [blocks, 256]; one, filled up with zeros, where it has less."""
    flat = values.flatten()
    whole = len(flat) // BLOCK * BLOCK
    return flat[:whole].view(-1, BLOCK)[:: _every(values)] if whole else in_blocks(flat)


def _every(values: Tensor) -> int:
    return max(1, values.numel() // MOST)


def _count(values: Tensor) -> int:
    """Blocks that `_some` gives."""
    return max(1, -(-(values.numel() // BLOCK) // _every(values)))

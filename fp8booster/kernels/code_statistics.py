"""Losses of 8-bit codes that are no FP8: activations, sums of gradients and moments of Adam, by some values of each."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.adamw import AdamRates
from fp8booster.kernels.adamw_8bit import (
    BLOCK,
    INVERSE,
    Moments8bit,
    decode_first,
    decode_second,
    in_blocks,
    left_blocks,
    master_of,
    next_moments,
)
from fp8booster.kernels.cast_statistics import statistics
from fp8booster.kernels.group_codes import GROUP, GroupCodes, decode_groups

MOST = 2**20  # less than twice as many values of a tensor are looked at


def activation_statistics(values: Tensor, codes: GroupCodes) -> tuple[int, Tensor]:
    """Return the number of values looked at, and `cast_statistics.statistics` of a matrix, [M, K], and its codes."""
    rows = slice(None, None, max(1, values.numel() // MOST))
    values = values[rows]
    return values.numel(), statistics(values, decode_groups(GroupCodes(codes.codes[rows], codes.amaxes[rows])))


class SumSample:
    """Some groups of a sum and one more gradient, before they are rounded; made before the addition.

    Args:
        sums, gradient: as `gradient_sums.add_to_sums` takes them.
    """

    def __init__(self, sums: GroupCodes, gradient: Tensor) -> None:
        self._sums = sums
        self._exact = _decoded_sums(sums) + _spaced(gradient.reshape(-1), GROUP).float()

    def statistics(self) -> tuple[int, Tensor]:
        """After the addition, as `activation_statistics`."""
        return self._exact.numel(), statistics(self._exact, _decoded_sums(self._sums))


def _decoded_sums(sums: GroupCodes) -> Tensor:
    codes = _spaced(sums.codes[0], GROUP)
    return decode_groups(GroupCodes(codes, sums.amaxes[0, :: _every(sums.codes)][: len(codes), None]))


def _spaced(flat: Tensor, size: int) -> Tensor:
    """Whole blocks of so many values, [blocks, size]; all that there is where it is less than one."""
    whole = flat.numel() // size * size
    return flat[:whole].view(-1, size)[:: _every(flat)] if whole else flat[None]


class MomentSample:
    """Some blocks of a tensor's moments as a step makes them, before it rounds them; made before the step.

    Args:
        value, low, gradient, moments: as `adamw_8bit.Shards8bit` holds them.
        row, rates: as `adamw_8bit.next_moments` takes them.
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
        count = self._moments.first.numel()  # less than a block is filled up
        pairs = zip(self._exact, _decoded(self._moments), strict=True)
        return [(one[:, :count].numel(), statistics(one[:, :count], other[:, :count])) for one, other in pairs]


def _decoded(moments: Moments8bit) -> tuple[Tensor, Tensor]:
    every = _every(moments.first)
    first = decode_first(_some(moments.first), moments.amaxes[::every][: _count(moments.first)])
    second = decode_second(_some(moments.second), moments.ranges[::every][: _count(moments.second)])
    return first, second


def _some(values: Tensor) -> Tensor:
    """Whole blocks of a tensor, [blocks, 256]; one, filled up with zeros, where it has less."""
    blocks = _spaced(values.flatten(), BLOCK)
    return blocks if blocks.shape[1] == BLOCK else in_blocks(blocks[0])


def _every(values: Tensor) -> int:
    return max(1, values.numel() // MOST)


def _count(values: Tensor) -> int:
    """Blocks that `_some` gives."""
    return max(1, -(-(values.numel() // BLOCK) // _every(values)))

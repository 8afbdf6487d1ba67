"""How far a value may lie from what was sent: derived from the formats, for tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8booster import formats
from fp8booster.comm import Encoding

MANTISSA_BITS = {formats.E4M3: 3, formats.E5M2: 2}
SMALLEST_SUBNORMAL = {formats.E4M3: 2.0**-9, formats.E5M2: 2.0**-16}
SCALE_ERROR = 2.0**-21
"""Of the scale, its inverse and the products with them, all in FP32."""


def block_amax(values: torch.Tensor, counts: list[int], block_size: int | None) -> torch.Tensor:
    """For each value the amax of the block that it shares a scale with; pieces as in `Layout`."""
    values = values.double()
    if block_size is None:
        return values.abs().max().expand_as(values)
    amax = []
    for piece in F.pad(values.abs(), (0, sum(counts) - values.numel())).split(counts):
        blocks = F.pad(piece, (0, -piece.numel() % block_size)).view(-1, block_size)
        amax.append(blocks.amax(1).repeat_interleave(block_size)[: piece.numel()])
    return torch.cat(amax)[: values.numel()]


def rounding_bound(values: torch.Tensor, amax: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """The largest error of one cast: half a step of the format, or of its subnormals where those are coarser."""
    half_step = 2.0 ** -(MANTISSA_BITS[encoding.format] + 1)
    relative = half_step / (1 + half_step)  # of the value halfway above a power of two, the worst
    largest = formats.MAX[encoding.format] / (2 if encoding.power_of_two else 1)
    floor = SMALLEST_SUBNORMAL[encoding.format] / 2 * amax / largest
    return torch.maximum(relative * values.double().abs(), floor) + SCALE_ERROR * values.double().abs()


def storage_bound(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of writing results into a tensor of `dtype`."""
    info = torch.finfo(dtype)
    return values.double().abs() * info.eps / 2 + info.smallest_normal * info.eps


def assert_within(actual: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Every value lies within its bound, the result's own rounding included."""
    error = (actual.double() - exact.double()).abs()
    allowed = bound * 1.01 + storage_bound(exact.double().abs() + bound, actual.dtype)
    worst = (error - allowed).argmax() if error.numel() else 0
    assert bool((error <= allowed).all()), (
        f"{actual.view(-1)[worst]} instead of {exact.view(-1)[worst]}, allowed {allowed.view(-1)[worst]:.3g}"
    )

"""Matrices that a cast may get wrong, and what compares casts of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from fp8booster.scaling import INPUT, WEIGHT, RealTime
from fp8booster.tensor import QuantizedMatrix

SHAPES = [(1, 1), (1, 16), (16, 1), (1, 5000), (5000, 1), (16, 16), (17, 5), (33, 130), (257, 96), (300, 1041)]

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it lies": lambda matrix: matrix,
    "transposed": lambda matrix: matrix.t(),
    "every second column": lambda matrix: matrix.repeat_interleave(2, 1)[:, ::2],
    "every third row": lambda matrix: matrix.repeat_interleave(3, 0)[::3],
    "within another": lambda matrix: torch.nn.functional.pad(matrix, (3, 4, 5, 6))[5:-6, 3:-4],
    "rows repeated": lambda matrix: matrix[:1].expand(18, -1),
}


def spread(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Values over many powers of two, with zeros of both signs among them."""
    values = torch.randn(shape) * torch.exp(2 * torch.randn(shape))
    values.view(-1)[::5] = 0.0
    values.view(-1)[1::11] = -0.0
    return values.to(dtype)


def special(dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Zeros, what lies at the edges of the dtype, and what is no number."""
    limits = torch.finfo(dtype)
    for name, value in (
        ("zeros", 0.0),
        ("subnormals", limits.smallest_normal / 4),
        ("smallest normals", limits.smallest_normal),
        ("largest", limits.max),
    ):
        yield name, torch.full((33, 50), value, dtype=dtype)
    for value in (limits.max, limits.smallest_normal / 4, math.inf, -math.inf, math.nan):
        matrix = spread((65, 130), dtype)
        matrix[64, 129] = value
        yield f"one {value}", matrix


def exact(shape: tuple[int, int], limit: float, dtype: torch.dtype) -> torch.Tensor:
    """Small integers times a power of two, with `limit` in the last place: FP8 holds all of them under a scale of 1."""
    matrix = (torch.randint(-7, 8, shape) * 2.0**4).to(dtype)
    matrix[-1, -1] = limit
    return matrix


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, where one NaN is as good as another."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits = torch.uint8 if one.element_size() == 1 else torch.int32
    nan = one.float().isnan()
    return torch.equal(nan, other.float().isnan()) and torch.equal(
        one.view(bits).masked_fill(nan, 0), other.view(bits).masked_fill(nan, 0)
    )


def quantize(
    matrix: torch.Tensor, dtype: torch.dtype, *, scale_for: str = "tensor", power_of_two: bool = False, **how: object
) -> QuantizedMatrix:
    """Cast a matrix by real-time scales, one for the "tensor", each "row", "group" of 128 or "block" of 128 x 128."""
    granularity = {"tensor": "tensorwise", "row": "rowwise"}.get(scale_for, "blockwise")
    role = WEIGHT if scale_for == "block" else INPUT
    return RealTime(granularity, power_of_two).cast(role, matrix, dtype, **how)

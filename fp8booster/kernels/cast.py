"""The cast of a matrix to FP8 with a real-time scale, in the layouts that products read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import ALIGNMENT, aligned
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of, scale_of


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to FP8, those beyond the format's range to its largest value; NaN stays NaN.

    The clamp comes first because torch before 2.12 turns what overflows into NaN, and so do some compilers' casts.
    """
    limit = formats.MAX[dtype]
    return values.clamp(-limit, limit).to(dtype)


def padded(matrix: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """A matrix, [R, C], in FP32 with zeros up to multiples of 16, or of another number."""
    rows, columns = matrix.shape
    return F.pad(matrix.float(), (0, aligned(columns, multiple) - columns, 0, aligned(rows, multiple) - rows))


def cast_outputs(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for what `cast` gives."""
    plain_shape, transposed_shape = output_shapes(*matrix.shape, plain, transposed)
    return (
        matrix.new_empty(plain_shape, dtype=dtype),
        matrix.new_empty(transposed_shape, dtype=dtype),
        matrix.new_empty((), dtype=torch.float32),
    )


def output_shapes(rows: int, columns: int, plain: bool, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of both layouts of a matrix."""
    rows, columns = aligned(rows), aligned(columns)
    return (rows, columns) if plain else (0,), (columns, rows) if transposed else (0,)


@operator()
def partial_amaxes(matrix: Tensor) -> Tensor:
    """float32, any number of values, whose largest is the amax of a matrix: what `cast` finds where it is given none.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
    """
    return amax_of(matrix).view(1)


@operator(rounds_to_fp8=True, fake=cast_outputs)
def cast(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix to FP8 with one real-time scale.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype: the FP8 format.
        plain: give the matrix as it lies.
        transposed: give its transpose too, or alone.
        power_of_two: see `scales.scale_of`.
        amax: float32, any shape, whose largest entry is the amax of the matrix; computed here if None.

    Returns:
        ([R16, C16] or empty, [C16, R16] or empty, inverse scale of shape []), where R16 and C16 are R and C rounded up
        to multiples of 16. What lies beyond R and C is a zero times the scale. Both layouts are contiguous.
    """
    scale, inverse_scale = scale_of(amax_of(matrix if amax is None else amax), dtype, power_of_two)
    data = saturate((padded(matrix) * scale).contiguous(), dtype)
    empty = data.new_empty(0)
    # through uint8: torch copies few FP8 tensors on CPU
    transpose = data.view(torch.uint8).t().contiguous().view(dtype) if transposed else empty
    return data if plain else empty, transpose, inverse_scale

"""Casts of a matrix to FP8 in which rows, or columns, have numbers of their own.

`rowwise_cast` gives each row of a matrix a scale, and each row of its transpose. A product undoes only scales that do
not vary along the dimension it sums over. fprop sums over features and reads x by rows; wgrad sums over tokens and
reads x by columns: the two layouts carry different scales and so different bytes.

`channel_cast` multiplies columns by powers of two before a cast under one scale. So a column that is much larger than
the others takes no bits from them. A product that sums over the columns is the same if the columns of its other operand
were divided by the same powers; its transpose undoes them row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.cast import cast_outputs, in_layouts, padded, saturate
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import scale_of


def rowwise_outputs(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the results of `rowwise_cast`."""
    data, transpose, _ = cast_outputs(matrix, dtype, plain=plain, transposed=transposed)
    inverse_scales = (matrix.new_empty(layout.shape[0], dtype=torch.float32) for layout in (data, transpose))
    return data, transpose, *inverse_scales


@operator(rounds_to_fp8=True, fake=rowwise_outputs)
def rowwise_cast(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix to FP8 with one real-time scale a row, and its transpose likewise.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.

    Returns:
        Both layouts as in `kernels.cast.cast`, and their inverse scales: float32 [R16] for the rows of the plain one
        and [C16] for the rows of the transpose, each empty where its layout is.
    """
    nothing = matrix.new_empty(0, dtype=dtype), matrix.new_empty(0, dtype=torch.float32)
    data, inverse_scale = _by_rows(matrix, dtype, power_of_two) if plain else nothing
    transpose, transpose_inverse_scale = _by_rows(matrix.t(), dtype, power_of_two) if transposed else nothing
    return data, transpose, inverse_scale, transpose_inverse_scale


def _by_rows(matrix: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    values = padded(matrix).contiguous()
    low, high = values.aminmax(dim=1)  # not abs().amax(): that would write the magnitudes to memory first
    scale, inverse_scale = scale_of(torch.maximum(-low, high), dtype, power_of_two)
    return saturate(values * scale[:, None], dtype), inverse_scale


@operator(rounds_to_fp8=True)
def channel_cast(
    matrix: Tensor,
    factors: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix whose columns are multiplied by factors.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        factors: float32 [C], powers of two.
        amax: float32 [], of the matrix times the factors.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.

    Returns:
        As `kernels.cast.cast`, of the matrix times the factors.
    """
    scale, inverse_scale = scale_of(amax, dtype, power_of_two)
    values = padded(matrix)
    # two products, but one rounding: by a power of two it is exact
    values = values * F.pad(factors, (0, values.shape[1] - len(factors)), value=1.0)
    data = saturate((values * scale).contiguous(), dtype)
    return *in_layouts(data, plain=plain, transposed=transposed), inverse_scale


@operator()
def column_amax(matrix: Tensor) -> Tensor:
    """Return the largest magnitude of each column, NaN where it holds a NaN.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides, R above 0.

    Returns:
        float32 [C].
    """
    return matrix.abs().amax(0).float()

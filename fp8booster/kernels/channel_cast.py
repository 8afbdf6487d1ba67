"""The cast of a matrix to FP8 under one scale, its columns multiplied by powers of two first.

So a column that is much larger than the others takes no bits from them. A product that sums over the columns is the
same if the columns of its other operand were divided by the same powers; its transpose undoes them row by row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.cast import padded, saturate
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import scale_of


@operator()
def column_amax(matrix: Tensor) -> Tensor:
    """The largest magnitude of each column, NaN where it holds a NaN.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides, R above 0.

    Returns:
        float32 [C].
    """
    return matrix.abs().amax(0).float()


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
    values = values * F.pad(factors, (0, values.shape[1] - len(factors)), value=1.0)
    data = saturate((values * scale).contiguous(), dtype)
    empty = data.new_empty(0)
    transpose = data.view(torch.uint8).t().contiguous().view(dtype) if transposed else empty
    return data if plain else empty, transpose, inverse_scale

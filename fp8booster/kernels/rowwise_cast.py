"""The cast of a matrix to FP8 with one scale for each row, and of its transpose with one for each row of that.

A product undoes only scales that do not vary along the dimension it sums over. fprop sums over features and reads x by
rows; wgrad sums over tokens and reads x by columns: the two layouts carry different scales and so different bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.cast import cast_outputs, padded, saturate
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import scale_of


def rowwise_outputs(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for what `rowwise_cast` gives."""
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
    data, inverse_scale = _by_rows(matrix, dtype, power_of_two, wanted=plain)
    transpose, transpose_inverse_scale = _by_rows(matrix.t(), dtype, power_of_two, wanted=transposed)
    return data, transpose, inverse_scale, transpose_inverse_scale


def _by_rows(matrix: Tensor, dtype: torch.dtype, power_of_two: bool, wanted: bool) -> tuple[Tensor, Tensor]:
    if not wanted:
        return matrix.new_empty(0, dtype=dtype), matrix.new_empty(0, dtype=torch.float32)
    values = padded(matrix).contiguous()
    low, high = values.aminmax(dim=1)
    scale, inverse_scale = scale_of(torch.maximum(-low, high), dtype, power_of_two)
    return saturate(values * scale[:, None], dtype), inverse_scale

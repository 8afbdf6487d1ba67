"""The cast of a matrix to FP8 with one scale for each row, and of its transpose with one for each row of that.

A product undoes only scales that do not vary along the dimension it sums over. fprop sums over features and reads x by
rows; wgrad sums over tokens and reads x by columns: the two layouts carry different scales and so different bytes.
"""

from __future__ import annotations

import torch

from fp8booster import scaling
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import padded, saturate
from fp8booster.kernels.device import why_no_fp8

RowwiseCast = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(plain, transpose, inverse scale of the plain rows, inverse scale of the transpose's rows)"""


def rowwise_cast(
    matrix: torch.Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, power_of_two: bool = True
) -> RowwiseCast:
    """Cast a matrix to FP8 with one real-time scale a row, and its transpose likewise.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.

    Returns:
        Both layouts as in `kernels.cast.cast`, and their inverse scales: float32 [R16] for the rows of the plain one
        and [C16] for the rows of the transpose, each empty where its layout is.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fp8booster.rowwise_cast(matrix, dtype, plain, transposed, power_of_two)
    return _rowwise_cast(matrix, dtype, plain, transposed, power_of_two)


def _rowwise_cast(
    matrix: torch.Tensor, dtype: torch.dtype, plain: bool, transposed: bool, power_of_two: bool
) -> RowwiseCast:
    if matrix.is_cuda and why_no_fp8(matrix.device) is None:
        from fp8booster.kernels.rowwise_cast_triton import rowwise_cast_triton as implementation
    else:
        implementation = rowwise_cast_reference
    return implementation(matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two)


@torch.library.custom_op("fp8booster::rowwise_cast", mutates_args=())
def _rowwise_cast_op(
    matrix: torch.Tensor, dtype: torch.dtype, plain: bool, transposed: bool, power_of_two: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rowwise_cast` for compiled code, which sees it whole and so computes the same bits as eager code."""
    return _rowwise_cast(matrix, dtype, plain, transposed, power_of_two)


@_rowwise_cast_op.register_fake
def _(matrix, dtype, plain, transposed, power_of_two):
    rows, columns = aligned(matrix.shape[0]), aligned(matrix.shape[1])
    return (
        matrix.new_empty((rows, columns) if plain else 0, dtype=dtype),
        matrix.new_empty((columns, rows) if transposed else 0, dtype=dtype),
        matrix.new_empty(rows if plain else 0, dtype=torch.float32),
        matrix.new_empty(columns if transposed else 0, dtype=torch.float32),
    )


def rowwise_cast_reference(
    matrix: torch.Tensor, dtype: torch.dtype, *, plain: bool, transposed: bool, power_of_two: bool
) -> RowwiseCast:
    """What `rowwise_cast` computes, in torch."""
    data, inverse_scale = _by_rows(matrix, dtype, power_of_two, wanted=plain)
    transpose, transpose_inverse_scale = _by_rows(matrix.t(), dtype, power_of_two, wanted=transposed)
    return data, transpose, inverse_scale, transpose_inverse_scale


def _by_rows(
    matrix: torch.Tensor, dtype: torch.dtype, power_of_two: bool, wanted: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if not wanted:
        return matrix.new_empty(0, dtype=dtype), matrix.new_empty(0, dtype=torch.float32)
    values = padded(matrix).contiguous()
    low, high = values.aminmax(dim=1)
    scale, inverse_scale = scaling.scale_of(torch.maximum(-low, high), dtype, power_of_two)
    return saturate(values * scale[:, None], dtype), inverse_scale

"""The cast of a matrix to FP8 with a scale for each group of 128 values of a row, or for each block of 128 x 128.

A product undoes such scales as it sums: those of 1 x 128 groups lie along the dimension that it sums over, so each
layout has groups of its own, along its rows. A block of 128 x 128 is the same block in the transpose: both layouts have
the same values and, but for the order in which products read them, the same scales.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.alignment import BLOCK, aligned
from fp8booster.kernels.cast import padded, saturate
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import scale_of

COLUMNS_OF_SCALES = 4
"""Products read the scales of a row of blocks in multiples of so many."""


def scales_shape(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """Return the shape of the inverse scales of an FP8 matrix of R128 rows and C128 columns."""
    if square:
        return rows // BLOCK, aligned(columns // BLOCK, COLUMNS_OF_SCALES)
    return columns // BLOCK, rows


def blockwise_outputs(
    matrix: Tensor, dtype: torch.dtype, *, square: bool, plain: bool = True, transposed: bool = False, **_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return memory for the results of `blockwise_cast`."""
    rows, columns = (aligned(size, BLOCK) for size in matrix.shape)
    data, transpose, inverse_scale, transpose_inverse_scale = (0,), (0,), (0,), (0,)
    if plain:
        data, inverse_scale = (rows, columns), scales_shape(rows, columns, square)
    if transposed:
        transpose, transpose_inverse_scale = (columns, rows), scales_shape(columns, rows, square)
    # beyond the blocks, scales are zero: products may read them, and uninitialized memory may be NaN
    new_scales = matrix.new_zeros if square else matrix.new_empty
    return (
        matrix.new_empty(data, dtype=dtype),
        matrix.new_empty(transpose, dtype=dtype),
        new_scales(inverse_scale, dtype=torch.float32),
        new_scales(transpose_inverse_scale, dtype=torch.float32),
    )


@operator(rounds_to_fp8=True, fake=blockwise_outputs)
def blockwise_cast(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    square: bool,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast a matrix to FP8 with real-time scales, one for each group or block, and its transpose likewise.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.
        square: one scale for each block of 128 x 128 values, not for each 128 values of a row.

    Returns:
        ([R128, C128] or empty, [C128, R128] or empty, inverse scales of the one, of the other), where R128 and C128
        are R and C rounded up to multiples of 128; zeros lie beyond R and C. Inverse scales of a layout of r rows and c
        columns are float32 and lie as Hopper's products read them: [c / 128, r] for groups; [r / 128, c / 128 rounded
        up to a multiple of 4] for blocks, with zeros beyond. They are empty where their layout is.
    """
    cast = _by_blocks if square else _by_groups
    nothing = matrix.new_empty(0, dtype=dtype), matrix.new_empty(0, dtype=torch.float32)
    data, inverse_scale = cast(matrix, dtype, power_of_two) if plain else nothing
    transpose, transpose_inverse_scale = cast(matrix.t(), dtype, power_of_two) if transposed else nothing
    return data, transpose, inverse_scale, transpose_inverse_scale


def _by_groups(matrix: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    # [R128, groups, 128]; scales are transposed last, for cuBLAS reads those of a column of groups one after the other
    groups = padded(matrix, BLOCK).contiguous().unflatten(1, (-1, BLOCK))
    scale, inverse_scale = scale_of(groups.abs().amax(2), dtype, power_of_two)
    return saturate(groups * scale[:, :, None], dtype).flatten(1), inverse_scale.t().contiguous()


def _by_blocks(matrix: Tensor, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    blocks = padded(matrix, BLOCK).contiguous().unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale, inverse_scale = scale_of(blocks.abs().amax((1, 3)), dtype, power_of_two)
    data = saturate(blocks * scale[:, None, :, None], dtype).flatten(2).flatten(0, 1)
    inverse_scales = inverse_scale.new_zeros(scales_shape(*data.shape, square=True))
    inverse_scales[:, : inverse_scale.shape[1]] = inverse_scale
    return data, inverse_scales


def are_groups(data: Tensor, inverse_scale: Tensor) -> bool:
    """Tell whether these are the inverse scales of groups of an FP8 matrix, not of its blocks: no shape is both."""
    return inverse_scale.shape == scales_shape(*data.shape, square=False)


def scales_of_groups(data: Tensor, inverse_scale: Tensor) -> Tensor:
    """Return the inverse scale of each 128 values of each row of one layout: [r, c / 128], whatever shares it."""
    if are_groups(data, inverse_scale):
        return inverse_scale.t()
    return inverse_scale[:, : data.shape[1] // BLOCK].repeat_interleave(BLOCK, 0)


def decoded(data: Tensor, inverse_scale: Tensor) -> Tensor:
    """Return the values of one layout in FP32, as it lies."""
    groups = data.float().unflatten(1, (-1, BLOCK))
    return (groups * scales_of_groups(data, inverse_scale)[:, :, None]).flatten(1)


def transposed_blocks(inverse_scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the inverse scales of the transpose of FP8 values, [rows, columns], from those of their blocks."""
    transposed = inverse_scale.new_zeros(scales_shape(columns, rows, square=True))
    # zeros in the padding: products may read there, and uninitialized memory may be NaN
    transposed[:, : rows // BLOCK] = inverse_scale[:, : columns // BLOCK].t()
    return transposed

"""The cast of a matrix times factors of its columns on a GPU: one launch for the columns' amaxes, one for the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import cast_outputs
from fp8booster.kernels.cast_triton import as_bytes, magnitude_bits, rounding, scale_from_bits, to_bits, widened
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.rowwise_cast_triton import row_and_column_amax_kernel

TILE_ROWS, TILE_COLUMNS = 64, 128


@triton.jit
def channel_cast_kernel(
    x,
    factors,  # float32 [columns]
    amax,
    plain,  # FP8 [out_rows, out_columns]
    transpose,  # FP8 [out_columns, out_rows]
    inverse_scale,
    rows,
    columns,
    row_stride,
    column_stride,
    out_rows,
    out_columns,
    column_tiles,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program casts one tile, from the last to the first, as the columns' amaxes were found."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    factor = tl.load(factors + column, mask=column < columns, other=1.0)
    scale, inverse = scale_from_bits(magnitude_bits(tl.load(amax)), LIMIT, POWER_OF_TWO)
    bits = to_bits(values.to(tl.float32) * factor[None, :] * scale, E4M3, LIMIT)
    writable = (row < out_rows)[:, None] & (column < out_columns)[None, :]
    if PLAIN:
        tl.store(as_bytes(plain) + row[:, None] * out_columns + column[None, :], bits, mask=writable)
    if TRANSPOSED:
        place = as_bytes(transpose) + column[:, None] * out_rows + row[None, :]
        tl.store(place, tl.trans(bits), mask=tl.trans(writable))
    if tl.program_id(0) == 0:
        tl.store(inverse_scale, inverse)


def column_amax_triton(matrix: Tensor) -> Tensor:
    """`column_amax`."""
    rows, columns = matrix.shape
    matrix = widened(matrix)
    amax = matrix.new_zeros(matrix.shape[1], dtype=torch.int32)
    column_tiles = ceil_div(matrix.shape[1], TILE_COLUMNS)
    launch(
        row_and_column_amax_kernel,
        column_tiles * ceil_div(rows, TILE_ROWS),
        (matrix, amax, amax),
        (*matrix.shape, *matrix.stride(), column_tiles),
        BY_ROWS=False,
        BY_COLUMNS=True,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
    )
    return amax.view(torch.float32)[:columns]


def channel_cast_triton(
    matrix: Tensor,
    factors: Tensor,
    amax: Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`channel_cast`, byte for byte."""
    outputs = cast_outputs(matrix, dtype, plain=plain, transposed=transposed)
    out_rows, out_columns = map(aligned, matrix.shape)
    if matrix.shape[1] == 1:
        matrix, factors = widened(matrix), factors.repeat(2)
    column_tiles = ceil_div(out_columns, TILE_COLUMNS)
    launch(
        channel_cast_kernel,
        column_tiles * ceil_div(out_rows, TILE_ROWS),
        (matrix, factors.contiguous(), amax, *outputs),
        (*matrix.shape, *matrix.stride(), out_rows, out_columns, column_tiles),
        **rounding(dtype, power_of_two),
        PLAIN=plain,
        TRANSPOSED=transposed,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
    )
    return outputs

"""Casts with a scale for each row or a factor for each column on a GPU: one launch for amaxes, one for the cast."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import cast_outputs
from fp8booster.kernels.cast_triton import as_bytes, magnitude_bits, rounding, scale_from_bits, to_bits, widened
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.rowwise_cast import rowwise_outputs

TILE_ROWS, TILE_COLUMNS = 64, 128
_TILE = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS}


@triton.jit
def row_and_column_amax_kernel(
    x,
    row_amax,  # int32 [rows], zero: magnitude bits
    column_amax,  # int32 [columns], zero
    rows,
    columns,
    row_stride,
    column_stride,
    column_tiles,
    BY_ROWS: tl.constexpr,
    BY_COLUMNS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program raises the amax of the rows and columns of one tile."""
    tile = tl.program_id(0)
    row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    bits = magnitude_bits(values)
    # atomics, for many tiles share a row; a maximum is the same in any order, so the bits are those of every run
    if BY_ROWS:
        tl.atomic_max(row_amax + row, tl.max(bits, 1), mask=row < rows, sem="relaxed")
    if BY_COLUMNS:
        tl.atomic_max(column_amax + column, tl.max(bits, 0), mask=column < columns, sem="relaxed")


@triton.jit
def rowwise_cast_kernel(
    x,
    row_amax,  # int32 [out_rows]
    column_amax,  # int32 [out_columns]
    plain,  # FP8 [out_rows, out_columns]
    transpose,  # FP8 [out_columns, out_rows]
    inverse_scale,  # float32 [out_rows]
    transpose_inverse_scale,  # float32 [out_columns]
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
    """Each program casts one tile by its rows' scales and by its columns'; the first tiles store the inverse scales."""
    # each layout is rounded by itself: its scales differ. The tile is read once for both, from the last to the first,
    # for what the amax launch read last is still in the L2 cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row_tile, column_tile = tile // column_tiles, tile % column_tiles
    row = row_tile.to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = column_tile.to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    values = values.to(tl.float32)
    writable = (row < out_rows)[:, None] & (column < out_columns)[None, :]
    if PLAIN:
        amax = tl.load(row_amax + row, mask=row < out_rows, other=0)
        scale, inverse = scale_from_bits(amax, LIMIT, POWER_OF_TWO)
        bits = to_bits(values * scale[:, None], E4M3, LIMIT)
        tl.store(as_bytes(plain) + row[:, None] * out_columns + column[None, :], bits, mask=writable)
        tl.store(inverse_scale + row, inverse, mask=(row < out_rows) & (column_tile == 0))
    if TRANSPOSED:
        amax = tl.load(column_amax + column, mask=column < out_columns, other=0)
        scale, inverse = scale_from_bits(amax, LIMIT, POWER_OF_TWO)
        bits = to_bits(values * scale[None, :], E4M3, LIMIT)
        place = as_bytes(transpose) + column[:, None] * out_rows + row[None, :]
        tl.store(place, tl.trans(bits), mask=tl.trans(writable))
        tl.store(transpose_inverse_scale + column, inverse, mask=(column < out_columns) & (row_tile == 0))


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


def _tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the tiles of a row of tiles, and of a matrix."""
    column_tiles = ceil_div(columns, TILE_COLUMNS)
    return column_tiles, column_tiles * ceil_div(rows, TILE_ROWS)


def rowwise_cast_triton(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, power_of_two: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `rowwise_cast`, byte for byte."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:  # a transposed view: cast what it is a view of
        one, other, one_scale, other_scale = rowwise_cast_triton(
            matrix.t(), dtype, plain=transposed, transposed=plain, power_of_two=power_of_two
        )
        return other, one, other_scale, one_scale
    out_rows, out_columns = map(aligned, matrix.shape)
    outputs = rowwise_outputs(matrix, dtype, plain=plain, transposed=transposed)
    matrix = widened(matrix)
    row_amax, column_amax = matrix.new_zeros(out_rows + out_columns, dtype=torch.int32).split([out_rows, out_columns])
    column_tiles, tiles = _tiles(out_rows, out_columns)
    tensors, sizes = (matrix, row_amax, column_amax), (*matrix.shape, *matrix.stride())
    wanted = {"BY_ROWS": plain, "BY_COLUMNS": transposed}
    launch(row_and_column_amax_kernel, tiles, tensors, (*sizes, column_tiles), **wanted, **_TILE)
    numbers = (*sizes, out_rows, out_columns, column_tiles)
    options = {**rounding(dtype, power_of_two), "PLAIN": plain, "TRANSPOSED": transposed}
    launch(rowwise_cast_kernel, tiles, (*tensors, *outputs), numbers, **options, **_TILE)
    return outputs


def column_amax_triton(matrix: Tensor) -> Tensor:
    """Compute `column_amax`."""
    columns = matrix.shape[1]
    matrix = widened(matrix)
    amax = matrix.new_zeros(matrix.shape[1], dtype=torch.int32)
    column_tiles, tiles = _tiles(*matrix.shape)
    numbers = (*matrix.shape, *matrix.stride(), column_tiles)
    launch(row_and_column_amax_kernel, tiles, (matrix, amax, amax), numbers, BY_ROWS=False, BY_COLUMNS=True, **_TILE)
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
    """Compute `channel_cast`, byte for byte."""
    outputs = cast_outputs(matrix, dtype, plain=plain, transposed=transposed)
    out_rows, out_columns = map(aligned, matrix.shape)
    if matrix.shape[1] == 1:
        matrix, factors = widened(matrix), factors.repeat(2)
    column_tiles, tiles = _tiles(out_rows, out_columns)
    tensors = (matrix, factors.contiguous(), amax, *outputs)
    numbers = (*matrix.shape, *matrix.stride(), out_rows, out_columns, column_tiles)
    options = {**rounding(dtype, power_of_two), "PLAIN": plain, "TRANSPOSED": transposed}
    launch(channel_cast_kernel, tiles, tensors, numbers, **options, **_TILE)
    return outputs

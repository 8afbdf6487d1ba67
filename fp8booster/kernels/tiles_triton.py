"""Tiles of a matrix inside kernels: read as values or codes, written as codes or, transposed, in FP8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast_triton import rounding, scale_from_bits, store_transposed, to_bits
from fp8booster.kernels.group_codes_triton import AT_ONCE, amax_place, decode_tile, encode_tile
from fp8booster.kernels.launch import block_over, ceil_div, launch

# of a tile that is written transposed; a group of codes is as long as its rows, so a tile reads each amax once
_ROWS, _COLUMNS, _WARPS = 64, 128, 8


@triton.jit
def tile_inside(tile, rows, columns, column_tiles, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return (row, column, mask) of a tile's values."""
    # rows in 64 bits, for they are multiplied by strides
    row = (tile // column_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)[:, None]
    column = (tile % column_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def tile_amaxes(tile, row, rows, columns, column_tiles, TILE_COLUMNS: tl.constexpr):
    """Return (place, mask) of the amaxes of a tile's codes."""
    place, inside = amax_place(row, (tile % column_tiles) * TILE_COLUMNS, columns, TILE_COLUMNS)
    return place, inside & (row < rows)


@triton.jit
def tile_place(row, column, stride, values):
    """Return the offsets of a tile's values; `values` tells their dtype."""
    # as many at once as of their codes: see `AT_ONCE`
    at_once: tl.constexpr = AT_ONCE // values.dtype.element_ty.primitive_bitwidth
    return tl.max_contiguous(row * stride + column, (1, at_once))


@triton.jit
def load_tile(
    values,
    amaxes,  # of the codes, where DECODE
    place,
    inside,
    amax_at,
    amax_inside,
    DECODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Load a tile of values, or of codes, in FP32."""
    tile = tl.load(values + place, mask=inside, other=0)
    if DECODE:
        tile = decode_tile(tile, tl.load(amaxes + amax_at, mask=amax_inside, other=0.0), TILE_ROWS, TILE_COLUMNS)
    return tile.to(tl.float32)


@triton.jit
def store_codes(
    values, codes, amaxes, place, inside, amax_at, amax_inside, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """Store a tile, FP32 with zeros outside, in 8 bits."""
    tile, amax = encode_tile(values, TILE_ROWS, TILE_COLUMNS)
    tl.store(codes + place, tile, mask=inside)
    tl.store(amaxes + amax_at, amax.to(amaxes.dtype.element_ty), mask=amax_inside)


@triton.jit
def cast_transposed(
    values,
    row,
    column,
    amax_bits,
    transpose,
    inverse_scale,
    out_rows,
    out_columns,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Cast a tile, FP32, by the scale of an amax, and store it in the transpose, FP8 [out_columns, out_rows].

    The first program stores the inverse scale.
    """
    scale, inverse = scale_from_bits(amax_bits, LIMIT, POWER_OF_TWO)
    store_transposed(transpose, to_bits(values * scale, E4M3, LIMIT), row, column, out_rows, out_columns)
    if tl.program_id(0) == 0:
        tl.store(inverse_scale, inverse)


def launch_transposed(
    kernel: triton.JITFunction,
    tensors: tuple[Tensor, ...],
    shape: torch.Size,
    strides: tuple[int, ...],
    amax: Tensor,
    dtype: torch.dtype,
    power_of_two: bool,
    **constants: bool | str,
) -> tuple[Tensor, Tensor]:
    """Launch a kernel that ends with `cast_transposed`, a program for each tile.

    Its parameters are `tensors`, the partial maxima, the transpose, the inverse scale, the number of partial maxima,
    the sizes of the matrix, `strides`, its sizes rounded up to 16, tiles in a row of tiles, and constants.

    Returns:
        (the transpose, the inverse scale), as `kernels.cast.cast` gives them.
    """
    rows, columns = shape
    out_rows, out_columns = aligned(rows), aligned(columns)
    partials = amax.contiguous()
    transpose = amax.new_empty((out_columns, out_rows), dtype=dtype)
    inverse_scale = amax.new_empty((), dtype=torch.float32)
    count, column_tiles = partials.numel(), ceil_div(out_columns, _COLUMNS)
    launch(
        kernel,
        column_tiles * ceil_div(out_rows, _ROWS),
        (*tensors, partials, transpose, inverse_scale),
        (count, rows, columns, *strides, out_rows, out_columns, column_tiles),
        num_warps=_WARPS,
        **constants,
        **rounding(dtype, power_of_two),
        PARTIALS_BLOCK=block_over(count),
        TILE_ROWS=_ROWS,
        TILE_COLUMNS=_COLUMNS,
    )
    return transpose, inverse_scale

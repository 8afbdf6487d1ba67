"""The cast of a shard, and the unpacking of gathered ones, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.cast_triton import as_bytes, magnitude_bits, rounding, scale_from_bits, to_bits
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.shard_cast import require_contiguous

_BLOCK = 4096
_TILE = 64


@triton.jit
def cast_shard_kernel(
    shard,
    amax,
    out,  # FP8 [count]
    inverse_scale,
    count,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program casts BLOCK values; the first stores the inverse scale."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(shard + index, mask=index < count, other=0.0)
    scale, inverse = scale_from_bits(magnitude_bits(tl.load(amax)), LIMIT, POWER_OF_TWO)
    tl.store(as_bytes(out) + index, to_bits(values.to(tl.float32) * scale, E4M3, LIMIT), mask=index < count)
    if tl.program_id(0) == 0:
        tl.store(inverse_scale, inverse)


@triton.jit
def unpack_kernel(
    matrix,
    inverse_scale,
    transpose,
    weight,
    rows,
    columns,
    transpose_stride,
    column_tiles,
    E4M3: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program takes one square: transposes it, where TRANSPOSED, and decodes it where VALUES are wanted."""
    tile = tl.program_id(0)
    row = (tile // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    bits = tl.load(as_bytes(matrix) + row * columns + column, mask=inside, other=0)
    if TRANSPOSED:
        place = as_bytes(transpose) + tl.trans(column * transpose_stride + row)
        tl.store(place, tl.trans(bits), mask=tl.trans(inside))
    if VALUES:
        values = bits.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
        values *= tl.load(inverse_scale)
        tl.store(weight + row * columns + column, values.to(weight.dtype.element_ty), mask=inside)


def cast_shard_triton(
    shard: Tensor, amax: Tensor, out: Tensor, inverse_scale: Tensor, power_of_two: bool = False
) -> None:
    """`cast_shard`, byte for byte."""
    require_contiguous(shard, out)
    launch(
        cast_shard_kernel,
        ceil_div(shard.numel(), _BLOCK),
        (shard, amax, out, inverse_scale),
        (shard.numel(),),
        num_warps=8,
        **rounding(out.dtype, power_of_two),
        BLOCK=_BLOCK,
    )


def unpack_triton(matrix: Tensor, inverse_scale: Tensor, transpose: Tensor | None, weight: Tensor | None) -> None:
    """`unpack`, byte for byte."""
    if transpose is None and weight is None:
        return
    rows, columns = matrix.shape
    column_tiles = ceil_div(columns, _TILE)
    launch(
        unpack_kernel,
        column_tiles * ceil_div(rows, _TILE),
        (matrix, inverse_scale, matrix if transpose is None else transpose, matrix if weight is None else weight),
        (rows, columns, 0 if transpose is None else transpose.stride(0), column_tiles),
        E4M3=matrix.dtype is formats.E4M3,
        TRANSPOSED=transpose is not None,
        VALUES=weight is not None,
        TILE=_TILE,
    )

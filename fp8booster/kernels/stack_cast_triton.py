"""The cast of many matrices as the rows of one, on a GPU: one launch finds their amax, one casts, as of one matrix."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import attrgetter

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import output_shapes
from fp8booster.kernels.cast_triton import (
    as_bytes,
    cast_triton,
    magnitude_bits,
    rounding,
    scale_from_bits,
    tile_shape,
    to_bits,
)
from fp8booster.kernels.launch import ceil_div, processors
from fp8booster.kernels.tables_triton import launch_over, own_entry, own_pointer, own_size

_DEVICE = attrgetter("device")

_BLOCK, _WARPS = 4096, 8
_PROGRAMS = 8  # for each processor, of the amax launch; of many matrices each has a run of programs all the same


@triton.jit
def stack_amaxes_kernel(
    entries,  # of values and their count
    owners,
    values,
    partials,  # float32 [matrices, MOST], zero
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program stores the largest magnitude of its blocks of a matrix: every so many as there are programs."""
    entry, matrix, program = own_entry(entries, owners, 2)
    values, count = own_pointer(entry, 0, values, ALIGNED), own_size(entry, 1, ALIGNED)
    blocks = tl.cdiv(count, BLOCK).to(tl.int32)
    programs = tl.minimum(blocks, MOST)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.int32)
    for _ in range(program, tl.where(program < programs, blocks, 0), programs):
        largest = tl.maximum(largest, magnitude_bits(tl.load(values + index, mask=index < count, other=0.0)))
        index += programs.to(tl.int64) * BLOCK
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.store(partials + matrix * MOST + program, amax, mask=program < programs)


@triton.jit
def stack_cast_kernel(
    entries,  # of a matrix, its rows, its first row in the stack, and its rows there with the padding
    owners,
    matrix,
    amax,
    plain,  # FP8 [stacked, out_columns]
    transpose,  # FP8 [out_columns, stacked]
    inverse_scale,
    columns,
    stacked,
    out_columns,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program casts one tile of a matrix and writes it in the layouts asked for, where it lies in the stack."""
    entry, place, tile = own_entry(entries, owners, 4)
    matrix, rows = own_pointer(entry, 0, matrix, ALIGNED), own_size(entry, 1, ALIGNED)
    first, out_rows = own_size(entry, 2, ALIGNED), own_size(entry, 3, ALIGNED)
    column_tiles = tl.cdiv(out_columns, TILE_COLUMNS)
    row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(matrix + row * columns + column, mask=inside, other=0.0)
    scale, inverse = scale_from_bits(magnitude_bits(tl.load(amax)), LIMIT, POWER_OF_TWO)
    bits = to_bits(values.to(tl.float32) * scale, E4M3, LIMIT)
    # the padding too: products read its zeros. In the stack it lies behind the last matrix alone
    writable = (row < out_rows) & (column < out_columns)
    if PLAIN:
        tl.store(as_bytes(plain) + (first + row) * out_columns + column, bits, mask=writable)
    if TRANSPOSED:
        # transposed with the tile, as in `store_transposed`
        target = as_bytes(transpose) + tl.trans(column * stacked + first + row)
        tl.store(target, tl.trans(bits), mask=tl.trans(writable))
    if (place == 0) & (tile == 0):
        tl.store(inverse_scale, inverse)


@functools.cache
def _blocks_up_to(most: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda counts: np.minimum(ceil_div(counts, _BLOCK), most)


@functools.cache
def _tiles_of(tile_rows: int, column_tiles: int) -> Callable[..., np.ndarray]:
    return lambda rows, firsts, out_rows: ceil_div(out_rows, tile_rows) * column_tiles


def stack_cast_triton(
    matrices: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `stack_cast`, byte for byte; of matrices whose rows do not follow each other by a copy of them."""
    first = matrices[0]
    columns = first.shape[1]
    rows, counts = list(map(Tensor.size, matrices, repeat(0))), list(map(Tensor.numel, matrices))
    # of one column, or of no value in the first, the loads of a cast are those of `cast_triton` (`widened`)
    # torch refuses those that lie on several devices, of which a kernel can read one
    in_place = all(map(Tensor.is_contiguous, matrices)) and len(set(map(_DEVICE, matrices))) == 1
    if columns == 1 or not counts[0] or not in_place:
        whole = torch.cat([matrix.detach() for matrix in matrices])
        return cast_triton(whole, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two)
    amax = _amax(matrices, counts)
    plain_shape, transposed_shape = output_shapes(sum(rows), columns, plain, transposed)
    data, transpose = first.new_empty(plain_shape, dtype=dtype), first.new_empty(transposed_shape, dtype=dtype)
    inverse_scale = first.new_empty((), dtype=torch.float32)
    firsts = [0, *accumulate(rows[:-1])]
    stacked = aligned(sum(rows))
    out_rows = [*rows[:-1], stacked - firsts[-1]]
    tile_rows, tile_columns = tile_shape(sum(counts), transposed)
    launch_over(
        stack_cast_kernel,
        [matrices],
        [rows, firsts, out_rows],
        _tiles_of(tile_rows, ceil_div(aligned(columns), tile_columns)),
        (amax, data, transpose, inverse_scale),
        (columns, stacked, aligned(columns)),
        **rounding(dtype, power_of_two),
        PLAIN=plain,
        TRANSPOSED=transposed,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
    )
    return data, transpose, inverse_scale


def _amax(matrices: Sequence[Tensor], counts: list[int]) -> Tensor:
    """Return the amax of all: float32, shape []."""
    device = matrices[0].device
    most = ceil_div(_PROGRAMS * processors(device), len(matrices))
    partials = torch.zeros(len(matrices), most, dtype=torch.float32, device=device)
    launch_over(
        stack_amaxes_kernel,
        [matrices],
        [counts],
        _blocks_up_to(most),
        (partials,),
        num_warps=_WARPS,
        MOST=most,
        BLOCK=_BLOCK,
    )
    return partials.amax()  # a NaN stays one

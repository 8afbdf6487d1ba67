"""The cast of shards, and the unpacking of gathered ones, on a GPU: one launch for all."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.cast_triton import as_bytes, magnitude_bits, rounding, scale_from_bits, to_bits
from fp8booster.kernels.launch import ceil_div
from fp8booster.kernels.shard_cast import require_contiguous
from fp8booster.kernels.tables_triton import launch_over, own_entry, own_pointer, own_size

_BLOCK = 4096
_TILE = 64


@triton.jit
def cast_shards_kernel(
    entries,  # of shard, out [count] FP8, inverse scale, and the count
    owners,
    shard,
    out,
    inverse_scale,
    amaxes,  # of all shards
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program casts BLOCK values; a shard's first stores the inverse scale."""
    entry, place, program = own_entry(entries, owners, 4)
    shard, out = own_pointer(entry, 0, shard, ALIGNED), own_pointer(entry, 1, out, ALIGNED)
    inverse_scale = own_pointer(entry, 2, inverse_scale, False)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < own_size(entry, 3, ALIGNED)
    values = tl.load(shard + index, mask=inside, other=0.0)
    scale, inverse = scale_from_bits(magnitude_bits(tl.load(amaxes + place)), LIMIT, POWER_OF_TWO)
    tl.store(as_bytes(out) + index, to_bits(values.to(tl.float32) * scale, E4M3, LIMIT), mask=inside)
    if program == 0:  # shards with one amax store the same bits to the scale that they share
        tl.store(inverse_scale, inverse)


@triton.jit
def unpack_kernel(
    entries,  # of matrix, transpose, weight, inverse scale; rows, columns and the transpose's stride
    owners,
    matrix,
    transpose,
    weight,
    inverse_scale,
    E4M3: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    VALUES: tl.constexpr,
    TILE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program takes one square: transposes it, where TRANSPOSED, and decodes it where VALUES are wanted."""
    entry, _, tile = own_entry(entries, owners, 7)
    matrix, inverse_scale = own_pointer(entry, 0, matrix, ALIGNED), own_pointer(entry, 3, inverse_scale, False)
    rows, columns = own_size(entry, 4, ALIGNED), own_size(entry, 5, ALIGNED)
    column_tiles = tl.cdiv(columns, TILE).to(tl.int32)
    row = (tile // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < columns)
    bits = tl.load(as_bytes(matrix) + row * columns + column, mask=inside, other=0)
    if TRANSPOSED:
        place = as_bytes(own_pointer(entry, 1, transpose, ALIGNED))
        place += tl.trans(column * own_size(entry, 6, ALIGNED) + row)
        tl.store(place, tl.trans(bits), mask=tl.trans(inside))
    if VALUES:
        values = bits.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
        values *= tl.load(inverse_scale)
        place = own_pointer(entry, 2, weight, ALIGNED) + row * columns + column
        tl.store(place, values.to(weight.dtype.element_ty), mask=inside)


def _parts_of(counts: np.ndarray) -> np.ndarray:
    return ceil_div(counts, _BLOCK)


def _squares_in(rows: np.ndarray, columns: np.ndarray, strides: np.ndarray) -> np.ndarray:
    return ceil_div(rows, _TILE) * ceil_div(columns, _TILE)


def cast_shards_triton(
    shards: Sequence[Tensor],
    amaxes: Tensor,
    outs: Sequence[Tensor],
    inverse_scales: Sequence[Tensor],
    power_of_two: bool = False,
) -> None:
    """Compute `cast_shards`, byte for byte."""
    require_contiguous(shards, outs)
    columns = shards, outs, inverse_scales
    for dtype in dict.fromkeys([out.dtype for out in outs]):  # a format is a constant of the compiled kernel
        of_dtype = [place for place, out in enumerate(outs) if out.dtype is dtype]
        given, made, scalars = ([column[place] for place in of_dtype] for column in columns)
        of_given = amaxes if len(given) == len(shards) else torch.stack([amaxes[place] for place in of_dtype])
        launch_over(
            cast_shards_kernel,
            [given, made],
            [list(map(Tensor.numel, given))],
            _parts_of,
            (of_given,),
            scalars=[scalars],
            num_warps=8,
            **rounding(dtype, power_of_two),
            BLOCK=_BLOCK,
        )


def unpack_triton(
    matrices: Sequence[Tensor],
    inverse_scales: Sequence[Tensor],
    transposes: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> None:
    """Compute `unpack`, byte for byte."""
    wanted = [
        (matrix.dtype, transpose is not None, weight is not None)
        for matrix, transpose, weight in zip(matrices, transposes, weights, strict=True)
    ]
    for dtype, transposed, decoded in dict.fromkeys(wanted):
        if not (transposed or decoded):
            continue
        alike = [place for place, what in enumerate(wanted) if what == (dtype, transposed, decoded)]
        given = [matrices[place] for place in alike]
        rows, columns = [matrix.shape[0] for matrix in given], [matrix.shape[1] for matrix in given]
        flipped = [transposes[place] for place in alike] if transposed else given
        launch_over(
            unpack_kernel,
            [given, flipped, [weights[place] for place in alike] if decoded else given],
            [rows, columns, [tensor.stride(0) if transposed else 0 for tensor in flipped]],
            _squares_in,
            scalars=[[inverse_scales[place] for place in alike]],
            E4M3=dtype is formats.E4M3,
            TRANSPOSED=transposed,
            VALUES=decoded,
            TILE=_TILE,
        )

"""Normalisation of rows on a GPU: a row is held in registers, so every tensor is read and written once."""

from __future__ import annotations

import functools
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import largest_partial, magnitude_bits
from fp8booster.kernels.group_codes import GROUP, GroupCodes, new_codes
from fp8booster.kernels.group_codes_triton import AT_ONCE, amax_place, decode_tile, encode_tile
from fp8booster.kernels.launch import MOST_LAUNCHES, Launch, block_over, new_partials, processors
from fp8booster.kernels.row_norm import Normalized, NormGradients
from fp8booster.kernels.tiles_triton import (
    cast_transposed,
    launch_transposed,
    load_tile,
    tile_amaxes,
    tile_inside,
    tile_place,
)

WARPS, FEWEST_PROGRAMS = 32, 4
"""On a processor: warps in flight, and programs at least. Each leaves a partial maximum, which every program of a cast
reads, so there are no more than keep memory busy."""

BACKWARD_VALUES = 8192
"""Of the rows in flight on a processor in backward, whose programs leave partial sums of the gradients of weight and
bias too."""


@triton.jit
def load_factors(weight, inside, UNIT_OFFSET: tl.constexpr):
    """Load the factors of a row, FP32."""
    factors = tl.load(weight, mask=inside, other=0.0).to(tl.float32)
    return 1.0 + factors if UNIT_OFFSET else factors


@triton.jit
def center(values, inside, columns, CENTERED: tl.constexpr):
    """Return values of a row, FP32 with zeros outside, less their mean where CENTERED."""
    # zeros outside again: the squares of what lies there are summed next
    return tl.where(inside, values - tl.sum(values, 0) / columns, 0.0) if CENTERED else values


@triton.jit
def row_norm_kernel(
    x,
    residual,
    weight,
    bias,
    y,
    h,
    inverse_rms,
    partials,
    codes,  # of h, and their amaxes, where ENCODE
    amaxes,
    rows,
    columns,
    kinds,  # of rows, which have weights of their own; a divisor of the number of programs
    EPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ENCODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program normalises every num_programs-th row."""
    at_once: tl.constexpr = AT_ONCE // x.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, BLOCK)
    inside = column < columns
    kind = tl.program_id(0) % kinds * columns
    factors = load_factors(weight + kind + column, inside, UNIT_OFFSET)
    if BIAS:
        shift = tl.load(bias + kind + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.max_contiguous((tl.zeros([1], tl.int64) + row) * columns + column, at_once)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            total = values + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            # rounded before it is normalised: backward, and the next block, have h as memory holds it
            rounded = total.to(h.dtype.element_ty)
            tl.store(h + place, rounded, mask=inside)
            values = rounded.to(tl.float32)
        centered = center(values, inside, columns, CENTERED)
        # the root rounded right, as torch's: its error would be that of the whole row
        inverse = 1.0 / tl.sqrt_rn(tl.sum(centered * centered, 0) / columns + EPS)
        out = centered * inverse * factors
        if BIAS:
            out += shift
        out = out.to(y.dtype.element_ty)
        tl.store(y + place, out, mask=inside)
        tl.store(inverse_rms + row, inverse)
        largest = tl.maximum(largest, magnitude_bits(out))  # of what was rounded, as a cast reads it
        if ENCODE:
            encoded, amax = encode_tile(values, 1, BLOCK)
            tl.store(codes + place, encoded, mask=inside)
            amax_at, amax_inside = amax_place(tl.zeros([1, 1], tl.int64) + row, 0, columns, BLOCK)
            tl.store(amaxes + amax_at, amax.to(amaxes.dtype.element_ty), mask=amax_inside)
    tl.store(partials + tl.program_id(0), tl.max(largest, 0).to(tl.float32, bitcast=True))


@triton.jit
def row_norm_transposed_kernel(
    h,  # or its codes
    amaxes,  # of the codes, where DECODE; else h again
    weight,
    inverse_rms,
    partials,
    transpose,
    inverse_scale,
    partial_count,
    rows,
    columns,
    out_rows,
    out_columns,
    column_tiles,
    UNIT_OFFSET: tl.constexpr,
    DECODE: tl.constexpr,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program makes one tile of y, rounded as by `row_norm_kernel`, and stores it in y's transpose in FP8."""
    tile = tl.program_id(0)
    row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
    amax_at, amax_inside = tile_amaxes(tile, row, rows, columns, column_tiles, TILE_COLUMNS)
    place = tile_place(row, column, columns, amaxes)
    values = load_tile(h, amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
    # vectors: as a column and a row of two dimensions, they would impose their layouts on the tile
    of_rows = (tile // column_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    of_columns = (tile % column_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    inverse = tl.load(inverse_rms + of_rows, mask=of_rows < rows, other=0.0)
    factors = load_factors(weight + of_columns, of_columns < columns, UNIT_OFFSET)
    y = tl.where(inside, values * inverse[:, None] * factors[None, :], 0.0)  # not -0, of a factor below 0
    y = y.to(amaxes.dtype.element_ty).to(tl.float32)
    amax = largest_partial(partials, partial_count, PARTIALS_BLOCK)
    cast_transposed(y, row, column, amax, transpose, inverse_scale, out_rows, out_columns, E4M3, LIMIT, POWER_OF_TWO)


@triton.jit
def row_norm_backward_kernel(
    dy,
    h,  # or its codes
    amaxes,  # of the codes, where DECODE
    weight,
    inverse_rms,
    dh,
    dx,
    dweights,  # float32 [programs, columns]
    dbiases,  # likewise, where BIAS
    partials,
    rows,
    columns,
    kinds,  # as in `row_norm_kernel`
    RESIDUAL: tl.constexpr,
    BIAS: tl.constexpr,
    CENTERED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every num_programs-th row and sums the gradients of weight and bias over them."""
    at_once: tl.constexpr = AT_ONCE // dy.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, BLOCK)
    inside = column < columns
    kind = tl.program_id(0) % kinds * columns
    factors = load_factors(weight + kind + column, inside, UNIT_OFFSET)
    # in FP32 and in registers over all rows of the program: 16-bit sums of thousands of rows would lose most of them
    dweight = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        dbias = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.max_contiguous((tl.zeros([1], tl.int64) + row) * columns + column, at_once)
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_rms + row)
        values = tl.load(h + place, mask=inside, other=0)
        if DECODE:  # h in 8 bits: what is lost there is lost for dweight and dx alike
            amax_at, amax_inside = amax_place(tl.zeros([1, 1], tl.int64) + row, 0, columns, BLOCK)
            values = decode_tile(values, tl.load(amaxes + amax_at, mask=amax_inside, other=0.0), 1, BLOCK)
        normal = center(values.to(tl.float32), inside, columns, CENTERED) * inverse
        weighted = gradient * factors
        dweight += gradient * normal
        if BIAS:
            dbias += gradient
        centered = center(weighted, inside, columns, CENTERED)
        values = inverse * (centered - normal * (tl.sum(weighted * normal, 0) / columns))
        if RESIDUAL:
            values += tl.load(dh + place, mask=inside, other=0.0).to(tl.float32)
        out = values.to(dx.dtype.element_ty)
        tl.store(dx + place, out, mask=inside)
        largest = tl.maximum(largest, magnitude_bits(out))
    place = tl.program_id(0).to(tl.int64) * columns + column
    tl.store(dweights + place, dweight, mask=inside)
    if BIAS:
        tl.store(dbiases + place, dbias, mask=inside)
    tl.store(partials + tl.program_id(0), tl.max(largest, 0).to(tl.float32, bitcast=True))


def warps_for(block: int) -> int:
    """Return the warps of a program whose rows take a power of two values, `GROUP` or more."""
    # a thread holds 4 or 8 values of a short row, 16 of a longer one, up to 8192
    return min(16, max(1, min(4, block // 256), block // 512))


def _kinds(weight: Tensor) -> int:
    return weight.numel() // weight.shape[-1]


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _launch(
    backward: bool, shape: torch.Size, kinds: int, device: torch.device, **constants: bool | float
) -> tuple[Launch, int]:
    """Return the launch of `row_norm_kernel` or its backward, and its number of programs."""
    rows, columns = shape
    block = max(GROUP, block_over(columns))
    warps = warps_for(block)
    at_once = max(FEWEST_PROGRAMS, WARPS // warps)
    if backward:
        at_once = min(at_once, max(1, BACKWARD_VALUES // block))
    most = at_once * processors(device)
    programs = min(rows, max(kinds, most // kinds * kinds))  # so many that a program's rows are all of one kind
    kernel = row_norm_backward_kernel if backward else row_norm_kernel
    return Launch(kernel, (rows, columns, kinds), num_warps=warps, **constants, BLOCK=block), programs


def row_norm_triton(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = False,
    unit_offset: bool = False,
    encoded: bool = False,
) -> Normalized:
    """Compute `row_norm`, up to the order of sums over a row."""
    launch, programs = _launch(
        False,
        x.shape,
        _kinds(weight),
        x.device,
        EPS=eps,
        RESIDUAL=residual is not None,
        BIAS=bias is not None,
        CENTERED=centered,
        UNIT_OFFSET=unit_offset,
        ENCODE=encoded,
    )
    partials = new_partials(programs, x)
    y = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    inverse_rms = x.new_empty(len(x), dtype=torch.float32)
    written = new_codes(x) if encoded else None
    # pointers that are not read need some tensor
    added = x if residual is None else residual, weight, weight if bias is None else bias
    launch(programs, x, *added, y, h, inverse_rms, partials, *(written or (y, y)))
    return Normalized(y, h, inverse_rms, partials, written)


def row_norm_transposed_triton(
    h: Tensor | GroupCodes,
    weight: Tensor,
    inverse_rms: Tensor,
    *,
    unit_offset: bool = False,
    amax: Tensor,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `row_norm_transposed`."""
    encoded = isinstance(h, GroupCodes)
    tensors = (*(h if encoded else (h, h)), weight, inverse_rms)
    options = {"UNIT_OFFSET": unit_offset, "DECODE": encoded}
    return launch_transposed(row_norm_transposed_kernel, tensors, h.shape, (), amax, dtype, power_of_two, **options)


def row_norm_backward_triton(
    dy: Tensor,
    h: Tensor | GroupCodes,
    weight: Tensor,
    inverse_rms: Tensor,
    dh: Tensor | None = None,
    *,
    centered: bool = False,
    unit_offset: bool = False,
    biased: bool = False,
) -> NormGradients:
    """Compute `row_norm_backward`, up to the order of sums."""
    decoded = isinstance(h, GroupCodes)
    launch, programs = _launch(
        True,
        h.shape,
        _kinds(weight),
        dy.device,
        RESIDUAL=dh is not None,
        BIAS=biased,
        CENTERED=centered,
        UNIT_OFFSET=unit_offset,
        DECODE=decoded,
    )
    partials = new_partials(programs, dy)
    dx = torch.empty_like(dy, dtype=h.dtype)
    dweights = dy.new_empty((programs, h.shape[1]), dtype=torch.float32)
    dbiases = torch.empty_like(dweights) if biased else None
    codes = h if decoded else (h, h)
    summed = dweights, dweights if dbiases is None else dbiases
    launch(programs, dy, *codes, weight, inverse_rms, dy if dh is None else dh, dx, *summed, partials)
    # by torch, in one order: atomics would add a weight's gradient in another order at every run
    dweight, dbias = (
        None if each is None else each.view(-1, *weight.shape).sum(0).to(weight.dtype) for each in (dweights, dbiases)
    )
    return NormGradients(dx, cast(Tensor, dweight), dbias, partials)

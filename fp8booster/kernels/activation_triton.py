"""Activations on a GPU: one launch each way, which delivers the amax of what it writes."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.activation import CUBIC, LINEAR, Activated, RowWeights
from fp8booster.kernels.cast_triton import largest_partial, magnitude_bits
from fp8booster.kernels.group_codes import GroupCodes, new_codes
from fp8booster.kernels.launch import MOST_LAUNCHES, Launch, ceil_div, new_partials, processors
from fp8booster.kernels.tiles_triton import (
    cast_transposed,
    launch_transposed,
    load_tile,
    store_codes,
    tile_amaxes,
    tile_inside,
    tile_place,
)

PROGRAMS = 8  # a processor: few enough that their partial maxima cost a cast nothing
TILE_ROWS, TILE_COLUMNS = 1, 1024  # parts of one row, so that each access is one run of memory

_LINEAR, _CUBIC, _SLOPE = (tl.constexpr(each) for each in (LINEAR, LINEAR * CUBIC, 3 * LINEAR * CUBIC))
_ROOT_HALF, _DENSITY = tl.constexpr(math.sqrt(0.5)), tl.constexpr(1 / math.sqrt(2 * math.pi))


@triton.jit
def exponential(x, KIND: tl.constexpr):
    """Return exp(-z), where f(x) = x / (1 + exp(-z))."""
    if KIND == "silu":
        return tl.exp(-x)
    return tl.exp(-x * (_LINEAR + _CUBIC * x * x))


@triton.jit
def value_of(x, KIND: tl.constexpr):
    """Return f(x)."""
    if KIND == "gelu":
        return x * (0.5 + 0.5 * tl.erf(x * _ROOT_HALF))
    return x / (1 + exponential(x, KIND))


@triton.jit
def value_and_slope(x, KIND: tl.constexpr):
    """Return f(x) and its derivative."""
    if KIND == "gelu":
        share = 0.5 + 0.5 * tl.erf(x * _ROOT_HALF)
        return x * share, share + x * tl.exp(-0.5 * x * x) * _DENSITY
    sigmoid = 1 / (1 + exponential(x, KIND))
    y = x * sigmoid
    if KIND == "silu":
        return y, sigmoid + y * (1 - sigmoid)
    return y, sigmoid + y * (1 - sigmoid) * (_LINEAR + _SLOPE * x * x)


@triton.jit
def activation_kernel(
    dy,  # of y, where BACKWARD
    x,
    up,
    x_codes,  # written where ENCODE
    x_amaxes,  # and read where DECODE: then x and up are codes
    up_codes,
    up_amaxes,
    weights,  # of the rows, where WEIGHTED
    choices,  # where a row's weight lies among these, -1 where it has none
    dweights,  # float32 [weights, column_tiles], where WEIGHTED and BACKWARD: each tile's part of their gradients
    out,  # y [rows, columns] or, where BACKWARD, the gradients of x and up, [rows, columns or twice as many]
    partials,
    rows,
    columns,
    x_stride,
    up_stride,
    column_tiles,
    tile_count,
    KIND: tl.constexpr,
    GATED: tl.constexpr,  # else there is no up
    WEIGHTED: tl.constexpr,
    BACKWARD: tl.constexpr,
    ENCODE: tl.constexpr,
    DECODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every num_programs-th tile."""
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
        amax_at, amax_inside = tile_amaxes(tile, row, rows, columns, column_tiles, TILE_COLUMNS)
        place = tile_place(row, column, x_stride, out)
        values = load_tile(x, x_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
        if GATED:
            place = tile_place(row, column, up_stride, out)
            factors = load_tile(up, up_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
        if WEIGHTED:
            # of a vector, as a column would be loaded once for each value that a thread has of a row
            of_rows = tile // column_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
            choice = tl.load(choices + of_rows, mask=of_rows < rows, other=-1)
            weight = tl.load(weights + choice, mask=choice >= 0, other=0.0).to(tl.float32)[:, None]
        if BACKWARD:
            gradient = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            # y again, not read: forward kept x and up, which both gradients need anyhow
            y, slope = value_and_slope(values, KIND)
            if WEIGHTED:
                part = gradient * y * factors if GATED else gradient * y
                place = dweights + choice.to(tl.int64) * column_tiles + tile % column_tiles
                tl.store(place, tl.sum(part, 1), mask=choice >= 0)
                gradient *= weight
            if GATED:
                dx = (gradient * factors * slope).to(out.dtype.element_ty)
                dup = (gradient * y).to(out.dtype.element_ty)
                # side by side, as one product gave x and up: backward multiplies them as one matrix, under one scale
                place = out + row * (2 * columns) + column
                tl.store(place, dx, mask=inside)
                tl.store(place + columns, dup, mask=inside)
                largest = tl.maximum(largest, tl.maximum(magnitude_bits(dx), magnitude_bits(dup)))
            else:
                dx = (gradient * slope).to(out.dtype.element_ty)
                tl.store(out + row * columns + column, dx, mask=inside)
                largest = tl.maximum(largest, magnitude_bits(dx))
        else:
            y = value_of(values, KIND)
            if GATED:
                y *= factors
            if WEIGHTED:
                y *= weight
            y = y.to(out.dtype.element_ty)
            tl.store(out + row * columns + column, y, mask=inside)
            largest = tl.maximum(largest, magnitude_bits(y))
        if ENCODE:
            place = tile_place(row, column, columns, out)
            store_codes(values, x_codes, x_amaxes, place, inside, amax_at, amax_inside, TILE_ROWS, TILE_COLUMNS)
            if GATED:
                store_codes(factors, up_codes, up_amaxes, place, inside, amax_at, amax_inside, TILE_ROWS, TILE_COLUMNS)
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


@triton.jit
def activation_transposed_kernel(
    x,
    up,
    x_amaxes,  # where DECODE: then x and up are codes; else x and up again
    up_amaxes,
    partials,
    transpose,
    inverse_scale,
    partial_count,
    rows,
    columns,
    x_stride,
    up_stride,
    out_rows,
    out_columns,
    column_tiles,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    DECODE: tl.constexpr,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program makes one tile of y, rounded as by `activation_kernel`, and stores it in y's transpose in FP8."""
    tile = tl.program_id(0)
    row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
    amax_at, amax_inside = tile_amaxes(tile, row, rows, columns, column_tiles, TILE_COLUMNS)
    place = tile_place(row, column, x_stride, x_amaxes)
    y = value_of(load_tile(x, x_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS), KIND)
    if GATED:
        place = tile_place(row, column, up_stride, x_amaxes)
        y *= load_tile(up, up_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
    # rounded to 16 bits first, as forward's y was: the bytes are those of a cast of that
    y = y.to(x_amaxes.dtype.element_ty).to(tl.float32)
    amax = largest_partial(partials, partial_count, PARTIALS_BLOCK)
    cast_transposed(y, row, column, amax, transpose, inverse_scale, out_rows, out_columns, E4M3, LIMIT, POWER_OF_TWO)


def _run(
    dy: Tensor | None,
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None,
    kind: str,
    weights: RowWeights | None,
    out: Tensor,
    written: tuple[GroupCodes, ...] = (),
) -> tuple[Tensor, Tensor | None]:
    """Launch over [M, F] and return the partial maxima of what is written, and the gradient of the weights."""
    # pointers that are not read need some tensor
    gated, encoded, backward = up is not None, isinstance(x, GroupCodes), dy is not None
    up = up if gated else x
    codes = (*x, *up) if encoded else (*written[0], *written[-1]) if written else (out,) * 4
    x, up = (x.codes, up.codes) if encoded else (x, up)
    flags = {"GATED": gated, "WEIGHTED": weights is not None, "BACKWARD": backward}
    flags |= {"ENCODE": bool(written), "DECODE": encoded}
    launch, programs, column_tiles = _launch(x.shape, (x.stride(0), up.stride(0)), out.device, KIND=kind, **flags)
    partials = new_partials(programs, out)
    dweights = partials
    if weights is not None and backward:
        dweights = partials.new_zeros(weights.values.numel(), column_tiles)  # some may have no row
    of_rows = (out, out) if weights is None else weights
    launch(programs, dy if backward else out, x, up, *codes, *of_rows, dweights, out, partials)
    if dweights is partials:
        return partials, None
    of_weights = dweights.sum(1) if column_tiles > 1 else dweights
    return partials, of_weights.view(weights.values.shape).to(weights.values.dtype)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _launch(
    shape: torch.Size, strides: tuple[int, int], device: torch.device, **constants: bool | str
) -> tuple[Launch, int, int]:
    """Return the launch of `activation_kernel`, its number of programs, and that of the tiles of a row."""
    rows, columns = shape
    column_tiles = ceil_div(columns, TILE_COLUMNS)
    tile_count = column_tiles * ceil_div(rows, TILE_ROWS)
    programs = min(tile_count, PROGRAMS * processors(device))
    numbers = (rows, columns, *strides, column_tiles, tile_count)
    tile = {"TILE_ROWS": TILE_ROWS, "TILE_COLUMNS": TILE_COLUMNS}
    return Launch(activation_kernel, numbers, **constants, **tile), programs, column_tiles


def activate_triton(
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    encoded: bool = False,
    weights: RowWeights | None = None,
) -> Activated:
    """Compute `activate`."""
    y = (x if isinstance(x, Tensor) else x.amaxes).new_empty(x.shape)
    written = tuple(new_codes(y) for each in (x, up) if each is not None) if encoded else ()
    amaxes, _ = _run(None, x, up, kind, weights, y, written)
    return Activated(y, amaxes, *(*written, None, None)[:2])


def activate_transposed_triton(
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    amax: Tensor,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `activate_transposed`."""
    gated, encoded = up is not None, isinstance(x, GroupCodes)
    up = up if gated else x
    tensors = (x.codes, up.codes, x.amaxes, up.amaxes) if encoded else (x, up, x, up)
    strides = tensors[0].stride(0), tensors[1].stride(0)
    options = {"KIND": kind, "GATED": gated, "DECODE": encoded}
    return launch_transposed(
        activation_transposed_kernel, tensors, x.shape, strides, amax, dtype, power_of_two, **options
    )


def activate_backward_triton(
    dy: Tensor,
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    weights: RowWeights | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute `activate_backward`; weights' gradients are summed in another order."""
    rows, columns = dy.shape
    dx = dy.new_empty((rows, columns if up is None else 2 * columns), dtype=x.dtype)
    return dx, *_run(dy, x, up, kind, weights, dx)

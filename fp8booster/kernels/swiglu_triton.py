"""SwiGLU on a GPU: one launch each way, which delivers the amax of what it writes."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.amax_partials import new_partials, processors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.group_codes import GroupCodes, new_codes
from fp8booster.kernels.group_codes_triton import AT_ONCE, amax_place, decode_tile, encode_tile
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.swiglu import Activated

PROGRAMS = 8
"""A processor."""

TILE_ROWS = 1
TILE_COLUMNS = 1024


@triton.jit
def tile_inside(tile, rows, columns, column_tiles, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """(row, column, mask) of a tile's values."""
    row = (tile // column_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)[:, None]
    column = (tile % column_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


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
    """A tile in FP32, of values or of codes."""
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
def swiglu_kernel(
    dy,  # of y, where BACKWARD
    gate,
    up,
    gate_codes,  # written where ENCODE
    gate_amaxes,  # and read where DECODE: then gate and up are codes
    up_codes,
    up_amaxes,
    out,  # y [rows, columns] or, where BACKWARD, the gradients of gate and up, [rows, 2 columns]
    partials,
    rows,
    columns,
    gate_stride,
    up_stride,
    column_tiles,
    tile_count,
    BACKWARD: tl.constexpr,
    ENCODE: tl.constexpr,
    DECODE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every num_programs-th tile."""
    at_once: tl.constexpr = AT_ONCE // out.dtype.element_ty.primitive_bitwidth
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
        amax_at, amax_inside = amax_place(row, (tile % column_tiles) * TILE_COLUMNS, columns, TILE_COLUMNS)
        amax_inside &= row < rows
        place = tl.max_contiguous(row * gate_stride + column, (1, at_once))
        values = load_tile(gate, gate_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
        place = tl.max_contiguous(row * up_stride + column, (1, at_once))
        factors = load_tile(up, up_amaxes, place, inside, amax_at, amax_inside, DECODE, TILE_ROWS, TILE_COLUMNS)
        if BACKWARD:
            gradient = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
            sigmoid = 1 / (1 + tl.exp(-values))
            silu = values * sigmoid
            dgate = (gradient * factors * (sigmoid + silu * (1 - sigmoid))).to(out.dtype.element_ty)
            dup = (gradient * silu).to(out.dtype.element_ty)
            place = out + row * (2 * columns) + column
            tl.store(place, dgate, mask=inside)
            tl.store(place + columns, dup, mask=inside)
            largest = tl.maximum(largest, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)))
        else:
            y = (values / (1 + tl.exp(-values)) * factors).to(out.dtype.element_ty)
            tl.store(out + row * columns + column, y, mask=inside)
            largest = tl.maximum(largest, magnitude_bits(y))
        if ENCODE:
            place = tl.max_contiguous(row * columns + column, (1, at_once))
            store_codes(values, gate_codes, gate_amaxes, place, inside, amax_at, amax_inside, TILE_ROWS, TILE_COLUMNS)
            store_codes(factors, up_codes, up_amaxes, place, inside, amax_at, amax_inside, TILE_ROWS, TILE_COLUMNS)
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


def _launch(
    dy: Tensor | None,
    gate: Tensor | GroupCodes,
    up: Tensor | GroupCodes,
    out: Tensor,
    written: tuple[GroupCodes, GroupCodes] | None = None,
) -> Tensor:
    """Launch over [M, F]; the partial maxima of what is written."""
    rows, columns = gate.shape
    column_tiles = ceil_div(columns, TILE_COLUMNS)
    tile_count = column_tiles * ceil_div(rows, TILE_ROWS)
    programs = min(tile_count, PROGRAMS * processors(out.device))
    partials = new_partials(programs, out)
    encoded = isinstance(gate, GroupCodes)
    codes = (*gate, *up) if encoded else (*written[0], *written[1]) if written else (out,) * 4
    gate, up = (gate.codes, up.codes) if encoded else (gate, up)
    launch(
        swiglu_kernel,
        programs,
        (out if dy is None else dy, gate, up, *codes, out, partials),
        (rows, columns, gate.stride(0), up.stride(0), column_tiles, tile_count),
        BACKWARD=dy is not None,
        ENCODE=written is not None,
        DECODE=encoded,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
    )
    return partials


def swiglu_triton(gate: Tensor | GroupCodes, up: Tensor | GroupCodes, *, encoded: bool = False) -> Activated:
    """`swiglu`."""
    y = (gate if isinstance(gate, Tensor) else gate.amaxes).new_empty(gate.shape)
    written = (new_codes(y), new_codes(y)) if encoded else None
    return Activated(y, _launch(None, gate, up, y, written), *(written or (None, None)))


def swiglu_backward_triton(dy: Tensor, gate: Tensor | GroupCodes, up: Tensor | GroupCodes) -> tuple[Tensor, Tensor]:
    """`swiglu_backward`."""
    dx = dy.new_empty((dy.shape[0], 2 * dy.shape[1]), dtype=gate.dtype)
    return dx, _launch(dy, gate, up, dx)

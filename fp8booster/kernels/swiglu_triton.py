"""SwiGLU on a GPU: one launch each way, which delivers the amax of what it writes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.amax_partials import new_partials, processors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import ceil_div, launch

PROGRAMS = 8
"""A processor."""

TILE_ROWS = 2
TILE_COLUMNS = 1024


@triton.jit
def tile_inside(tile, rows, columns, column_tiles, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """(row, column, mask) of a tile's values."""
    row = (tile // column_tiles) * TILE_ROWS + tl.arange(0, TILE_ROWS).to(tl.int64)[:, None]
    column = (tile % column_tiles) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return row, column, (row < rows) & (column < columns)


@triton.jit
def swiglu_kernel(
    dy,  # of y, where BACKWARD
    gate,
    up,
    out,  # y [rows, columns] or, where BACKWARD, the gradients of gate and up, [rows, 2 columns]
    partials,
    rows,
    columns,
    gate_stride,
    up_stride,
    column_tiles,
    tile_count,
    BACKWARD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every num_programs-th tile."""
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
        values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        factors = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
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
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


def _launch(dy: Tensor | None, gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
    """Launch over [M, F]; the partial maxima of what is written."""
    rows, columns = gate.shape
    column_tiles = ceil_div(columns, TILE_COLUMNS)
    tile_count = column_tiles * ceil_div(rows, TILE_ROWS)
    programs = min(tile_count, PROGRAMS * processors(gate.device))
    partials = new_partials(programs, gate)
    launch(
        swiglu_kernel,
        programs,
        (gate if dy is None else dy, gate, up, out, partials),
        (rows, columns, gate.stride(0), up.stride(0), column_tiles, tile_count),
        BACKWARD=dy is not None,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
    )
    return partials


def swiglu_triton(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu`."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return y, _launch(None, gate, up, y)


def swiglu_backward_triton(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward`."""
    dx = gate.new_empty((gate.shape[0], 2 * gate.shape[1]))
    return dx, _launch(dy, gate, up, dx)

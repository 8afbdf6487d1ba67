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
    gate,
    up,
    y,
    partials,
    rows,
    columns,
    gate_stride,
    up_stride,
    column_tiles,
    tile_count,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every num_programs-th tile."""
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
        values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        factors = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        out = (values / (1 + tl.exp(-values)) * factors).to(y.dtype.element_ty)
        tl.store(y + row * columns + column, out, mask=inside)
        largest = tl.maximum(largest, magnitude_bits(out))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


@triton.jit
def swiglu_backward_kernel(
    dy,
    gate,
    up,
    dx,  # [rows, 2 columns]
    partials,
    rows,
    columns,
    gate_stride,
    up_stride,
    column_tiles,
    tile_count,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program takes every num_programs-th tile."""
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        row, column, inside = tile_inside(tile, rows, columns, column_tiles, TILE_ROWS, TILE_COLUMNS)
        gradient = tl.load(dy + row * columns + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        factors = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-values))
        silu = values * sigmoid
        dgate = (gradient * factors * (sigmoid + silu * (1 - sigmoid))).to(dx.dtype.element_ty)
        dup = (gradient * silu).to(dx.dtype.element_ty)
        place = dx + row * (2 * columns) + column
        tl.store(place, dgate, mask=inside)
        tl.store(place + columns, dup, mask=inside)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(dgate), magnitude_bits(dup)))
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


def _launch(kernel: triton.JITFunction, tensors: tuple[Tensor, ...], gate: Tensor, up: Tensor) -> Tensor:
    """Launch over [M, F]; returns the partial maxima, which are the kernel's last pointer."""
    rows, columns = gate.shape
    column_tiles = ceil_div(columns, TILE_COLUMNS)
    tile_count = column_tiles * ceil_div(rows, TILE_ROWS)
    programs = min(tile_count, PROGRAMS * processors(gate.device))
    partials = new_partials(programs, gate)
    launch(
        kernel,
        programs,
        (*tensors, partials),
        (rows, columns, gate.stride(0), up.stride(0), column_tiles, tile_count),
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
    )
    return partials


def swiglu_triton(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu`."""
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    return y, _launch(swiglu_kernel, (gate, up, y), gate, up)


def swiglu_backward_triton(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """`swiglu_backward`."""
    rows, columns = gate.shape
    dx = gate.new_empty((rows, 2 * columns))
    return dx, _launch(swiglu_backward_kernel, (dy, gate, up, dx), gate, up)

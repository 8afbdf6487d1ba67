"""The cast of many matrices on a GPU: one launch raises every amax, one casts every matrix and writes both layouts.

A table on the device says where each matrix and its outputs lie, and another to which matrix each tile belongs, so the
host's work does not grow with the number of matrices.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import magnitude_bits, rounding, scale_from_bits, to_bits
from fp8booster.kernels.launch import ceil_div, launch

FIELDS = tl.constexpr(6)
"""Of a matrix's entry: addresses of matrix, plain and transpose, rows, columns, first tile."""

TILE_ROWS = 64
TILE_COLUMNS = 128


@triton.jit
def tile_place(matrix, tile, table, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """(entry, row [TILE_ROWS, 1], column [1, TILE_COLUMNS], rows, columns) of a tile of a matrix."""
    entry = table + matrix.to(tl.int64) * FIELDS
    # in 32 bits, which divide fast; ManyCast takes multiples of 16 alone
    rows = tl.multiple_of(tl.load(entry + 3).to(tl.int32), 16)
    columns = tl.multiple_of(tl.load(entry + 4).to(tl.int32), 16)
    tile -= tl.load(entry + 5).to(tl.int32)
    column_tiles = tl.cdiv(columns, TILE_COLUMNS)
    row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    return entry, row, column, rows, columns


@triton.jit
def many_amax_kernel(
    like,  # any tensor of the matrices' dtype
    table,  # int64 [matrices, FIELDS]
    matrix_of_tile,  # int32 [tiles]
    amax,  # int32 [matrices], zero: magnitude bits
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program raises the amax of its tile's matrix. A maximum is the same in any order."""
    tile = tl.program_id(0)
    matrix = tl.load(matrix_of_tile + tile)
    entry, row, column, rows, columns = tile_place(matrix, tile, table, TILE_ROWS, TILE_COLUMNS)
    x = tl.multiple_of(tl.load(entry).to(like.dtype), 16)
    values = tl.load(x + row * columns + column, mask=(row < rows) & (column < columns), other=0.0)
    tl.atomic_max(amax + matrix, tl.max(tl.max(magnitude_bits(values), 1), 0), sem="relaxed")


@triton.jit
def many_cast_kernel(
    like,
    table,
    matrix_of_tile,
    amax,
    inverse_scales,
    inverse_scale_stride,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program casts one tile and writes it in both layouts; a matrix's first tile stores the inverse scale."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # what the amax launch read last comes first
    matrix = tl.load(matrix_of_tile + tile)
    entry, row, column, rows, columns = tile_place(matrix, tile, table, TILE_ROWS, TILE_COLUMNS)
    x = tl.multiple_of(tl.load(entry).to(like.dtype), 16)
    plain = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(tl.uint8)), 16)
    transpose = tl.multiple_of(tl.load(entry + 2).to(tl.pointer_type(tl.uint8)), 16)
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * columns + column, mask=inside, other=0.0)
    scale, inverse = scale_from_bits(tl.load(amax + matrix), LIMIT, POWER_OF_TWO)
    bits = to_bits(values.to(tl.float32) * scale, E4M3, LIMIT)
    tl.store(plain + row * columns + column, bits, mask=inside)
    tl.store(transpose + tl.trans(column * rows + row), tl.trans(bits), mask=tl.trans(inside))
    if tile == tl.load(entry + 5):
        tl.store(inverse_scales + matrix * inverse_scale_stride, inverse)


class Launches:
    """What `ManyCast.run` launches, with the bytes of its casts in torch; its tables are made once."""

    def __init__(
        self,
        matrices: Sequence[Tensor],
        plains: Sequence[Tensor],
        transposes: Sequence[Tensor],
        inverse_scales: Tensor,
        power_of_two: bool,
    ) -> None:
        self.first, self.inverse_scales = matrices[0], inverse_scales
        self.rounding = rounding(plains[0].dtype, power_of_two)
        entries, tiles = [], []
        for tensors in zip(matrices, plains, transposes, strict=True):
            addresses, (rows, columns) = [tensor.data_ptr() for tensor in tensors], tensors[0].shape
            entries.append([*addresses, rows, columns, sum(tiles)])
            tiles.append(ceil_div(rows, TILE_ROWS) * ceil_div(columns, TILE_COLUMNS))
        device = inverse_scales.device
        self.table = torch.tensor(entries, dtype=torch.int64, device=device)
        self.matrix_of_tile = torch.arange(len(tiles), dtype=torch.int32).repeat_interleave(
            torch.tensor(tiles, dtype=torch.int64)
        )
        self.matrix_of_tile = self.matrix_of_tile.to(device)
        self.amax = torch.zeros(len(tiles), dtype=torch.int32, device=device)

    def run(self) -> None:
        """Cast every matrix."""
        programs = self.matrix_of_tile.numel()
        tensors = (self.first, self.table, self.matrix_of_tile, self.amax)
        self.amax.zero_()
        launch(many_amax_kernel, programs, tensors, (), TILE_ROWS=TILE_ROWS, TILE_COLUMNS=TILE_COLUMNS)
        launch(
            many_cast_kernel,
            programs,
            (*tensors, self.inverse_scales),
            (self.inverse_scales.stride(0),),
            **self.rounding,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
        )

"""The order of gathered bytes, on a GPU."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.launch import ceil_div, launch

_TILE = 64


@triton.jit
def order_kernel(
    gathered,  # [ranks, outer, piece, columns]
    data,  # [padded, columns]
    transpose,  # [columns, padded]
    rows,
    padded,
    columns,
    column_tiles,
    outer,
    piece,
    ranks,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each program reads one square and writes it in one layout or both; rows beyond `rows` are zeros."""
    tile = tl.program_id(0)
    row = (tile // column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)[None, :]
    group, rank, within = row // (ranks * piece), row // piece % ranks, row % piece
    source = (rank * outer + group) * piece + within
    # bytes, whatever the format: their order changes and no value does
    bits = tl.load(gathered + source * columns + column, mask=(row < rows) & (column < columns), other=0)
    inside = (row < padded) & (column < columns)
    if PLAIN:
        tl.store(data + row * columns + column, bits, mask=inside)
    if TRANSPOSED:
        tl.store(transpose + tl.trans(column * padded + row), tl.trans(bits), mask=tl.trans(inside))


def order_triton(gathered: Tensor, outer: int, data: Tensor | None, transpose: Tensor | None) -> None:
    """Compute `order`, byte for byte."""
    ranks, rows, columns = gathered.shape
    padded, column_tiles = aligned(ranks * rows), ceil_div(columns, _TILE)
    launch(
        order_kernel,
        column_tiles * ceil_div(padded, _TILE),
        (gathered, gathered if data is None else data, gathered if transpose is None else transpose),
        (ranks * rows, padded, columns, column_tiles, outer, rows // outer, ranks),
        PLAIN=data is not None,
        TRANSPOSED=transpose is not None,
        TILE=_TILE,
    )

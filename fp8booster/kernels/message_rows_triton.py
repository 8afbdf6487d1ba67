"""Sums of rows of a message on a GPU, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.block_cast_triton import load_piece, tile_place, tiling_of
from fp8booster.kernels.launch import launch
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.message_rows import sum_message

WARPS = 8


@triton.jit
def sum_message_kernel(
    message,  # uint8, rows as pieces
    places,
    y,
    rows,
    count,
    size,  # bytes of a piece
    OF_TOKEN: tl.constexpr,
    E4M3: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program adds one tile of the rows of one token."""
    token, count = tl.program_id(0).to(tl.int64), tl.cast(count, tl.int64)
    block, within = tile_place(tl.program_id(1), BLOCK, TILE_BLOCKS)
    total = tl.zeros([TILE_BLOCKS, BLOCK], tl.float32)
    for number in tl.static_range(OF_TOKEN):
        row = tl.load(places + token * OF_TOKEN + number)
        if row < rows:
            values = load_piece(message, row * size, count, block, within, 1.0, E4M3, TENSORWISE, BLOCK)
            total += values.to(y.dtype.element_ty).to(tl.float32)  # as they are decoded
    tl.store(y + token * count + within, total.to(y.dtype.element_ty), mask=within < count)


def sum_message_triton(
    message: Tensor, places: Tensor, layout: MessageLayout, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Compute `sum_message`, bit for bit."""
    if layout.count == 1:  # of which Triton makes a constant
        return sum_message.reference(message, places, layout, dtype, out_dtype)
    sums = message.new_empty(len(places), layout.count, dtype=out_dtype)
    if sums.numel():
        tiling = tiling_of(layout.piece)
        # a factor and a sum in one rounding would be another value
        launch(
            sum_message_kernel,
            (len(places), tiling.tiles),
            (message, places, sums),
            (layout.pieces, layout.count, layout.piece_bytes),
            num_warps=WARPS,
            enable_fp_fusion=False,
            OF_TOKEN=places.shape[1],
            E4M3=dtype is formats.E4M3,
            **tiling.tile,
        )
    return sums

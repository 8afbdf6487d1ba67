"""Weighted sums of rows of a message on a GPU: one launch forward and one backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.block_cast_triton import load_piece, store_piece, tile_place, tiling_of
from fp8booster.kernels.cast_triton import magnitude_bits, rounding
from fp8booster.kernels.launch import launch
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.message_rows import sum_message, sum_message_backward

WARPS = 8


@triton.jit
def sum_message_kernel(
    message,  # uint8, rows as pieces
    places,
    weights,
    y,
    count,
    size,  # bytes of a piece
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
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
        choice = token * OF_TOKEN + number
        offset = tl.load(places + choice) * size
        values = load_piece(message, offset, count, block, within, 1.0, E4M3, TENSORWISE, BLOCK)
        values = values.to(y.dtype.element_ty).to(tl.float32)  # as they are decoded
        values = values * tl.load(weights + choice).to(tl.float32)
        if ROUNDED:  # as torch multiplies 16 bits by 16: the product is rounded before it is added
            values = values.to(y.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(y + token * count + within, total.to(y.dtype.element_ty), mask=within < count)


@triton.jit
def sum_message_backward_kernel(
    dy,  # of the sums
    message,
    places,
    weights,
    dmessage,
    dweights,
    count,
    size,
    end,  # the block behind the last of a piece, the padding included
    tiles,
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program makes the gradient of one row, encoded, and of its weight."""
    choice, count = tl.program_id(0).to(tl.int64), tl.cast(count, tl.int64)
    token, offset = choice // OF_TOKEN, tl.load(places + choice) * size
    weight = tl.load(weights + choice).to(tl.float32)
    total = tl.zeros([TILE_BLOCKS, BLOCK], tl.float32)
    # a whole row for each program: so the weight's gradient is one sum, without atomics
    for tile in tl.range(0, tiles):
        block, within = tile_place(tl.full([], tile, tl.int64), BLOCK, TILE_BLOCKS)
        gradient = tl.load(dy + token * count + within, mask=within < count, other=0.0).to(tl.float32)
        values = load_piece(message, offset, count, block, within, 1.0, E4M3, TENSORWISE, BLOCK)
        values = gradient * values.to(dy.dtype.element_ty).to(tl.float32)
        if ROUNDED:
            values = values.to(dy.dtype.element_ty).to(tl.float32)
        total += tl.where(within < count, values, 0.0)
        drow = (gradient * weight).to(dy.dtype.element_ty).to(tl.float32)
        amax_bits = tl.max(magnitude_bits(drow), 1)
        store_piece(
            drow, amax_bits, dmessage, offset, count, block, within, end, E4M3, LIMIT, POWER_OF_TWO, TENSORWISE, BLOCK
        )
    tl.store(dweights + choice, tl.sum(tl.sum(total, 1), 0).to(dweights.dtype.element_ty))


def _is_rounded(rows: torch.dtype, weights: Tensor) -> bool:
    return torch.promote_types(rows, weights.dtype) is not torch.float32


def sum_message_triton(
    message: Tensor, places: Tensor, weights: Tensor, layout: MessageLayout, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Compute `sum_message`, bit for bit."""
    if layout.count == 1:  # of which Triton makes a constant
        return sum_message.reference(message, places, weights, layout, dtype, out_dtype)
    sums = message.new_empty(len(places), layout.count, dtype=out_dtype)
    if sums.numel():
        tiling = tiling_of(layout.piece)
        # a product and a sum in one rounding would be another value
        launch(
            sum_message_kernel,
            (len(places), tiling.tiles),
            (message, places, weights, sums),
            (layout.count, layout.piece_bytes),
            num_warps=WARPS,
            enable_fp_fusion=False,
            OF_TOKEN=places.shape[1],
            ROUNDED=_is_rounded(out_dtype, weights),
            E4M3=dtype is formats.E4M3,
            **tiling.tile,
        )
    return sums


def sum_message_backward_triton(
    gradient: Tensor,
    message: Tensor,
    places: Tensor,
    weights: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute `sum_message_backward`, byte for byte; weights' gradients are summed in another order."""
    if layout.count == 1:
        return sum_message_backward.reference(gradient, message, places, weights, layout, dtype, power_of_two)
    dmessage, dweights = torch.empty_like(message), torch.empty_like(weights)
    if places.numel() and layout.count:
        tiling = tiling_of(layout.piece)
        launch(
            sum_message_backward_kernel,
            places.numel(),
            (gradient, message, places, weights, dmessage, dweights),
            (layout.count, layout.piece_bytes, tiling.end, tiling.tiles),
            num_warps=WARPS,
            enable_fp_fusion=False,
            OF_TOKEN=places.shape[1],
            ROUNDED=_is_rounded(gradient.dtype, weights),
            **rounding(dtype, power_of_two),
            **tiling.tile,
        )
    return dmessage, dweights

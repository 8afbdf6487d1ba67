"""Rows of tokens and their sums on a GPU: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import as_bytes
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.tiles_triton import tile_inside

LARGEST_BLOCK = 4096  # values of a row that a program has in registers at once
WARPS = 4


@triton.jit
def as_pairs(pointer):
    """Return a pointer to FP8 values as one to pairs of bytes."""
    return pointer.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def halves(pairs):
    """Return the first and the second bytes of pairs."""
    # Widened once for each: Triton then moves pairs between threads, by Hopper's transposition of 16-bit values. What
    # is widened once for both stays where it is, and bytes move one by one.
    first = (pairs.to(tl.uint32) & 0xFF).to(tl.uint8)
    second = (pairs.to(tl.int16, bitcast=True).to(tl.int32) >> 8).to(tl.uint8)
    return first, second


@triton.jit
def gather_rows_kernel(
    source,  # FP8 [tokens, 2 pairs], rows `source_stride` pairs apart
    choices,
    plain,  # FP8 [rows, 2 pairs], rows `plain_stride` pairs apart
    transpose,  # FP8 [2 pairs, rows]
    rows,
    pairs,
    source_stride,
    plain_stride,
    of_token,
    pair_tiles,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Each program moves one tile of rows into the layouts asked for.

    Bytes are moved by pairs, whatever the format: Hopper transposes 16 bits at a time, and bytes one by one.
    """
    row, pair, inside = tile_inside(tl.program_id(0), rows, pairs, pair_tiles, TILE_ROWS, TILE_PAIRS)
    # of a vector: a column has as many copies in a thread as the tile has values in a row of it
    of_rows = tl.program_id(0) // pair_tiles * TILE_ROWS + tl.arange(0, TILE_ROWS)
    choice = tl.load(choices + of_rows, mask=of_rows < rows, other=-1)[:, None]
    token = (choice // of_token).to(tl.int64)
    # zeros where a row pads, for wgrad sums over it
    bits = tl.load(as_pairs(source) + token * source_stride + pair, mask=inside & (choice >= 0), other=0)
    if PLAIN:
        tl.store(as_pairs(plain) + row * plain_stride + pair, bits, mask=inside)
    if TRANSPOSED:
        first, second = halves(bits)
        place = as_bytes(transpose) + tl.trans(2 * pair.to(tl.int64) * rows + row)
        inside = tl.trans(inside)
        tl.store(place, tl.trans(first), mask=inside)
        tl.store(place + rows, tl.trans(second), mask=inside)


@triton.jit
def sum_rows_kernel(
    x,  # rows
    places,  # int64 [tokens, OF_TOKEN]
    weights,  # [tokens, OF_TOKEN], where WEIGHTED
    y,  # sums
    rows,
    features,
    WEIGHTED: tl.constexpr,
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up a block of one token's rows; products are of the rows' dtype where ROUNDED, else FP32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(OF_TOKEN):
        choice = token * OF_TOKEN + number
        row = tl.load(places + choice)
        values = tl.load(x + row * features + column, mask=inside & (row < rows), other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + choice).to(tl.float32)
            if ROUNDED:  # as torch multiplies 16 bits by 16: the product is rounded before it is added
                values = values.to(x.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(y + token * features + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows_backward_kernel(
    dy,  # of the sums
    x,
    places,
    weights,
    dx,
    dweights,
    rows,
    features,
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program makes the gradient of one row and of its weight."""
    choice = tl.program_id(0).to(tl.int64)
    token, row = choice // OF_TOKEN, tl.load(places + choice)
    weight = tl.load(weights + choice).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # a whole row for each program: so the weight's gradient is one sum, without atomics
    for first in tl.range(0, features, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = (column < features) & (row < rows)
        gradient = tl.load(dy + token * features + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * features + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * features + column, (gradient * weight).to(dx.dtype.element_ty), mask=inside)
        values = gradient * values
        if ROUNDED:
            values = values.to(x.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(dweights + choice, tl.sum(total, 0).to(dweights.dtype.element_ty))


_TALL, _WIDE = (128, 64, 8), (16, 256, 4)  # rows, pairs, warps: a tall tile fills whole lines of the transpose, too


def gather_rows_triton(
    tokens: Tensor,
    choices: Tensor,
    of_token: int,
    *,
    plain: bool = True,
    transposed: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `gather_rows`, byte for byte."""
    rows, columns = len(choices), tokens.shape[1]
    pairs = columns // 2
    data = out if plain and out is not None else tokens.new_empty((rows, columns) if plain else (0,))
    transpose = tokens.new_empty((columns, rows) if transposed else (0,))
    tile_rows, tile_pairs, warps = _TALL if transposed else _WIDE
    pair_tiles = ceil_div(pairs, tile_pairs)
    launch(
        gather_rows_kernel,
        pair_tiles * ceil_div(rows, tile_rows),
        (tokens, choices, data, transpose),
        (rows, pairs, tokens.stride(0) // 2, data.stride(0) // 2 if plain else 0, of_token, pair_tiles),
        num_warps=warps,
        PLAIN=plain,
        TRANSPOSED=transposed,
        TILE_ROWS=tile_rows,
        TILE_PAIRS=tile_pairs,
    )
    return data, transpose


def _constants(rows: Tensor, places: Tensor, weights: Tensor | None) -> dict[str, object]:
    rounded = weights is not None and torch.promote_types(rows.dtype, weights.dtype) is not torch.float32
    block = min(LARGEST_BLOCK, 1 << (rows.shape[1] - 1).bit_length())
    # a product and a sum in one rounding would be another value
    return {
        "num_warps": WARPS,
        "enable_fp_fusion": False,
        "OF_TOKEN": places.shape[1],
        "ROUNDED": rounded,
        "BLOCK": block,
    }


def sum_rows_triton(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute `sum_rows`."""
    tokens, features = len(places), rows.shape[1]
    sums = rows.new_empty((tokens, features))
    constants = _constants(rows, places, weights)
    if sums.numel():
        launch(
            sum_rows_kernel,
            (tokens, ceil_div(features, constants["BLOCK"])),
            (rows, places, rows if weights is None else weights, sums),
            (len(rows), features),
            WEIGHTED=weights is not None,
            **constants,
        )
    return sums


def sum_rows_backward_triton(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `sum_rows_backward`; weights' gradients are summed in another order."""
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    if not rows.numel():
        dweights.zero_()
    else:
        launch(
            sum_rows_backward_kernel,
            places.numel(),
            (gradient, rows, places, weights, drows, dweights),
            rows.shape,
            **_constants(rows, places, weights),
        )
    return drows, dweights

"""FP8 messages on a GPU: one launch to encode, one to decode, one to add and encode again, each byte read once.

Every program handles a tile of whole blocks of one piece: the amax of a block is found in registers, from the values
that are then cast. The arithmetic is that of `block_cast`, so multiply and add are not fused into one rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.cast_triton import (
    largest_partial,
    magnitude_bits,
    partial_amaxes_triton,
    rounding,
    scale_from_bits,
    to_bits,
)
from fp8booster.kernels.launch import Launch, ceil_div
from fp8booster.kernels.message_layout import SCALES_ALIGNMENT, MessageLayout, side_by_side

PAYLOAD_ALIGNMENT = tl.constexpr(ALIGNMENT)
SLOTS_ALIGNMENT = tl.constexpr(SCALES_ALIGNMENT)


@triton.jit
def scales_behind(message, place):
    """Return a pointer to the scales that begin at a byte of a message, a multiple of 16."""
    return (message + place).to(tl.pointer_type(tl.float32), bitcast=True)


@triton.jit
def tile_place(tile, BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr):
    """Return (blocks [TILE_BLOCKS], values [TILE_BLOCKS, BLOCK]) of a tile, counted from the piece's first."""
    block = tile.to(tl.int64) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    return block, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def payload_bytes(count):
    """Return `MessageLayout.payload_bytes`."""
    return (count + PAYLOAD_ALIGNMENT - 1) // PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT


@triton.jit
def load_piece(
    message, offset, count, block, within, factor, E4M3: tl.constexpr, TENSORWISE: tl.constexpr, BLOCK: tl.constexpr
):
    """Load a tile of a piece in FP32, times a factor; `count` has 64 bits."""
    payload = payload_bytes(count)  # behind the piece's end lie the zeros of its padding, which keep the load whole
    bits = tl.load(message + offset + within, mask=within < payload, other=0)
    values = bits.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32) * factor
    # the factor first: FP8 values are small, so no sum of pieces with a finite mean overflows
    scales = scales_behind(message, offset + payload)
    if TENSORWISE:
        values = values * tl.load(scales)
    else:
        values = values * tl.load(scales + block, mask=block * BLOCK < count, other=0.0)[:, None]
    return values


@triton.jit
def store_piece(
    values,  # float32 [TILE_BLOCKS, BLOCK]
    amax_bits,  # int32 [TILE_BLOCKS], magnitude bits
    message,
    offset,
    count,
    block,
    within,
    end,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cast a tile by the amax of its blocks and store it and its inverse scales, up to block `end`."""
    # `count` has 64 bits: from 2^31 - 1024 values on, what it is rounded up to no longer fits in 32
    scale, inverse = scale_from_bits(amax_bits, LIMIT, POWER_OF_TWO)
    payload = payload_bytes(count)
    bits = to_bits(values * scale[:, None], E4M3, LIMIT)
    if TENSORWISE:  # none for an empty piece, where the next one's payload lies
        slots = tl.where(count > 0, SLOTS_ALIGNMENT, 0)
    else:
        slots = (count + SLOTS_ALIGNMENT * BLOCK - 1) // (SLOTS_ALIGNMENT * BLOCK) * SLOTS_ALIGNMENT
    tl.store(message + offset + within, bits, mask=(within < payload) & (block < end)[:, None])
    # the padding of the scales is stored too: all bytes of a message are sent
    tl.store(scales_behind(message, offset + payload) + block, inverse, mask=block < tl.minimum(slots, end))


# numbers that change from call to call: each of their alignments would be another variant to compile
@triton.jit(do_not_specialize=["partial_count", "first", "end", "tiles"])
def encode_kernel(
    x,
    message,  # uint8 [bytes]
    partials,  # float32 [partial_count], the largest of which is the amax of x, where TENSORWISE
    partial_count,
    total,  # values of x
    part,  # of them in each piece
    first,  # the block of a piece that x begins at
    end,  # the block behind its last, the padding included where nothing follows
    tiles,  # of a piece
    count,
    size,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program casts one tile of what a piece has of x: all of the piece, or some blocks of it."""
    piece, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    block, within = tile_place(tile, BLOCK, TILE_BLOCKS)
    start = piece * part
    inside = (within < part) & (start + within < total)
    values = tl.load(x + start + within, mask=inside, other=0.0).to(tl.float32)
    if TENSORWISE:
        amax_bits = tl.zeros([TILE_BLOCKS], tl.int32) + largest_partial(partials, partial_count, PARTIALS_BLOCK)
    else:
        # in registers, of the values that are cast next: one read of memory, where a matrix's cast takes two
        amax_bits = tl.max(magnitude_bits(values), 1)
    block, within = block + first, within + first.to(tl.int64) * BLOCK
    offset, count = piece * size, tl.cast(count, tl.int64)
    store_piece(
        values, amax_bits, message, offset, count, block, within, end, E4M3, LIMIT, POWER_OF_TWO, TENSORWISE, BLOCK
    )


@triton.jit(do_not_specialize=["tiles"])
def decode_kernel(
    message,  # uint8 [bytes]
    x,
    total,
    tiles,  # of a piece
    count,
    size,
    E4M3: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program decodes one tile of one piece."""
    piece, tile = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles
    block, within = tile_place(tile, BLOCK, TILE_BLOCKS)
    offset, count = piece * size, tl.cast(count, tl.int64)
    values = load_piece(message, offset, count, block, within, 1.0, E4M3, TENSORWISE, BLOCK)
    start = piece * count
    inside = (within < count) & (start + within < total)
    tl.store(x + start + within, values.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["end"])
def sum_kernel(
    message,  # uint8 [bytes]
    out,  # values, or, where ENCODE, uint8: their message
    total,
    end,  # the block behind the last, where ENCODE
    count,
    size,
    factor,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PIECES: tl.constexpr,
    ENCODE: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program adds the same tile of every piece, first piece to last, and stores the values or their message."""
    count = tl.cast(count, tl.int64)
    block, within = tile_place(tl.program_id(0), BLOCK, TILE_BLOCKS)
    values = tl.zeros([TILE_BLOCKS, BLOCK], tl.float32)
    # in the order of pieces, which all ranks share: replicas stay equal bit for bit
    for piece in tl.static_range(PIECES):
        offset = tl.full([], piece, tl.int64) * size
        values += load_piece(message, offset, count, block, within, factor, E4M3, TENSORWISE, BLOCK)
    if ENCODE:
        amax_bits = tl.max(magnitude_bits(values), 1)
        store_piece(values, amax_bits, out, 0, count, block, within, end, E4M3, LIMIT, POWER_OF_TWO, TENSORWISE, BLOCK)
    else:
        tl.store(out + within, values.to(out.dtype.element_ty), mask=within < total)


# by time on an H200: encode and decode then run at 4.0 TB/s, sums at 3.8
TILE_VALUES = 4096
WARPS, SUM_WARPS = 4, 8

TENSORWISE_BLOCK = 1024  # row of a tile where one scale serves all blocks

LAUNCHES = 4096  # remembered of each kind: enough for the gradients of a step, encoded from where they lie

_BEHIND_ALL = 2**62  # a number of values behind the last of any tensor


class Tiling(NamedTuple):
    """Division of a piece among the programs of a kernel."""

    tiles: int
    """With those that hold its unused scales."""

    tile: dict[str, int | bool]
    """The constants of a tile."""

    @property
    def end(self) -> int:
        """Return the block behind the last tile."""
        return self.tiles * self.tile["TILE_BLOCKS"]


def tiling_of(layout: MessageLayout) -> Tiling:
    """Return how a piece is divided."""
    block = layout.block_size or TENSORWISE_BLOCK
    # all copies of the one scale are the first tile's
    blocks = layout.scale_count
    if layout.block_size is None:
        blocks = max(blocks, ceil_div(layout.payload_bytes, block))
    # of short pieces, as rows of tokens are, no tile is longer than the piece
    of_tile = min(max(1, TILE_VALUES // block), 1 << (blocks - 1).bit_length())
    tile = {"TENSORWISE": layout.block_size is None, "BLOCK": block, "TILE_BLOCKS": of_tile}
    return Tiling(ceil_div(blocks, of_tile), tile)


def _without_ones(values: Tensor, part: int, pieces: int) -> tuple[Tensor, int]:
    """Return values in pieces of `part`, and that number, with zeros behind them where one of the counts is one."""
    # for the reason of `cast_triton.widened`; the zeros become the padding of the pieces, which is zero anyway
    if part == 1:
        column = F.pad(values.flatten(), (0, pieces - values.numel()))
        return F.pad(column.unsqueeze(1), (0, 1)).flatten(), 2
    return (F.pad(values.flatten(), (0, 1)) if values.numel() == 1 else values), part


def _end_of(values: Tensor, full: int) -> int:
    """Return the number behind the last of the values: the same of all that fill their pieces.

    So messages of rows, whose number is another each time, find one launch.
    """
    return _BEHIND_ALL if values.numel() >= full else values.numel()


@functools.lru_cache(maxsize=LAUNCHES)
def _encode_launch(
    piece: MessageLayout,
    total: int,
    part: int,
    first: int,
    end: int | None,
    partial_count: int,
    dtype: torch.dtype,
    power_of_two: bool,
) -> tuple[Launch, int]:
    """Return the launch of `encode_kernel`, up to the last tile where `end` is None, and the tiles of a piece."""
    tiling = tiling_of(piece)
    end = tiling.end if end is None else end
    tiles = ceil_div(end - first, tiling.tile["TILE_BLOCKS"])
    launch = Launch(
        encode_kernel,
        (partial_count, total, part, first, end, tiles, piece.count, piece.bytes),
        num_warps=WARPS,
        enable_fp_fusion=False,
        **rounding(dtype, power_of_two),
        PARTIALS_BLOCK=1 << (partial_count - 1).bit_length(),
        **tiling.tile,
    )
    return launch, tiles


def encode_triton(
    values: Tensor | Sequence[Tensor],
    message: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> None:
    """Compute `encode`, byte for byte."""
    if not isinstance(values, Tensor):
        if len(values) > 1 and layout.block_size is not None:
            _encode_side_by_side(values, message, layout, dtype, power_of_two)
            return
        values = side_by_side(values, layout.pieces)
    if layout.bytes == 0:
        return
    # a pointer that is not read needs some tensor
    partials, partial_count = message, 1
    if layout.block_size is None:
        partials = partial_amaxes_triton(values.view(1, -1))
        partial_count = partials.numel()
    values, part = _without_ones(values, layout.count, layout.pieces)
    total = _end_of(values, part * layout.pieces)
    launch, tiles = _encode_launch(layout.piece, total, part, 0, None, partial_count, dtype, power_of_two)
    launch(tiles * layout.pieces, values, message, partials)


def _encode_side_by_side(
    tensors: Sequence[Tensor], message: Tensor, layout: MessageLayout, dtype: torch.dtype, power_of_two: bool
) -> None:
    """Encode several tensors, each where it lies as far as its parts are whole blocks."""
    block, pieces = layout.block_size, layout.pieces
    of_blocks = list(takewhile(lambda tensor: tensor.numel() // pieces % block == 0, tensors))
    others = tensors[len(of_blocks) :]
    parts = [*of_blocks, side_by_side(others, pieces)] if others else of_blocks
    first = 0
    for tensor in parts:
        part = tensor.numel() // pieces
        end = layout.scale_count if tensor is parts[-1] else first + part // block
        tensor, part = _without_ones(tensor, part, pieces)
        total = _end_of(tensor, part * pieces)
        launch, tiles = _encode_launch(layout.piece, total, part, first, end, 1, dtype, power_of_two)
        launch(tiles * pieces, tensor, message, message)
        first = end  # the next tensor's blocks follow in each piece


@functools.lru_cache(maxsize=LAUNCHES)
def _decode_launch(piece: MessageLayout, total: int, dtype: torch.dtype) -> tuple[Launch, int]:
    """Return the launch of `decode_kernel`, and the tiles of a piece."""
    tiling = tiling_of(piece)
    launch = Launch(
        decode_kernel,
        (total, tiling.tiles, piece.count, piece.bytes),
        num_warps=WARPS,
        enable_fp_fusion=False,
        E4M3=dtype is formats.E4M3,
        **tiling.tile,
    )
    return launch, tiling.tiles


def decode_triton(message: Tensor, values: Tensor, layout: MessageLayout, dtype: torch.dtype) -> None:
    """Compute `decode`, byte for byte."""
    if layout.bytes == 0:
        return
    total = _end_of(values, layout.count * layout.pieces)
    launch, tiles = _decode_launch(layout.piece, total, dtype)
    launch(tiles * layout.pieces, message, values)


def decode_sum_triton(
    messages: Tensor, values: Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float = 1.0
) -> None:
    """Compute `decode_sum`, byte for byte."""
    launch, programs = _sum_launch(layout, values.numel(), dtype, factor, False, False)
    launch(programs, messages, values)


def decode_sum_encode_triton(
    messages: Tensor,
    message: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
    factor: float = 1.0,
) -> None:
    """Compute `decode_sum_encode`, byte for byte."""
    if layout.block_size is None:  # the scale needs the whole sum first
        total = torch.empty(layout.count, dtype=torch.float32, device=message.device)
        decode_sum_triton(messages, total, layout, dtype, factor)
        encode_triton(total, message, layout.piece, dtype, power_of_two)
        return
    launch, programs = _sum_launch(layout, layout.count, dtype, factor, True, power_of_two)
    launch(programs, messages, message)


@functools.lru_cache(maxsize=LAUNCHES)
def _sum_launch(
    layout: MessageLayout, total: int, dtype: torch.dtype, factor: float, encode: bool, power_of_two: bool
) -> tuple[Launch, int]:
    """Return the launch of `sum_kernel`, and its number of programs."""
    tiling = tiling_of(layout)
    launch = Launch(
        sum_kernel,
        (total, tiling.end, layout.count, layout.piece_bytes, float(factor)),
        num_warps=SUM_WARPS,
        enable_fp_fusion=False,
        **rounding(dtype, power_of_two),
        PIECES=layout.pieces,
        ENCODE=encode,
        **tiling.tile,
    )
    return launch, tiling.tiles

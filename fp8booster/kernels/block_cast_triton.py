"""FP8 messages on a GPU: one launch to encode, one to decode, one to add and encode again, each byte read once.

Every program handles a tile of whole blocks of one piece: the amax of a block is found in registers, from the values
that are then cast. Even pieces are found by arithmetic; uneven ones in a table that goes to the device without a sync.
The arithmetic is that of `block_cast.Reference`, so multiply and add are not fused into one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch
import triton
import triton.language as tl

from fp8booster import formats
from fp8booster.kernels.block_cast import SCALES_ALIGNMENT, Layout, Message, Peers, side_by_side
from fp8booster.kernels.cast import ALIGNMENT
from fp8booster.kernels.cast_triton import (
    amax_partials,
    largest_partial,
    magnitude_bits,
    scale_from_bits,
    to_bits,
)
from fp8booster.kernels.launch import ceil_div

PAYLOAD_ALIGNMENT = tl.constexpr(ALIGNMENT)
SLOTS_ALIGNMENT = tl.constexpr(SCALES_ALIGNMENT)


@triton.jit
def piece_place(piece, table, count, size, EVEN: tl.constexpr, UNIT: tl.constexpr):
    """(first value, values, first byte) of a piece; the first two multiples of UNIT."""
    if EVEN:
        start, length, offset = piece * count, count, piece * size
    else:
        entry = table + 3 * piece
        start, length = tl.multiple_of(tl.load(entry), UNIT), tl.multiple_of(tl.load(entry + 1), UNIT)
        offset = tl.multiple_of(tl.load(entry + 2), 16)
    return start, length, offset


@triton.jit
def peer_message(peers, piece, shift):
    """The message of the peer that holds a piece, as bytes and as float32."""
    address = tl.load(peers + piece) + shift
    message = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    return message, tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit
def tile_place(tile, BLOCK: tl.constexpr, TILE_BLOCKS: tl.constexpr):
    """(blocks [TILE_BLOCKS], values [TILE_BLOCKS, BLOCK]) of a tile, counted from the piece's first."""
    block = tile.to(tl.int64) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    return block, block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def payload_bytes(count):
    """`Layout.payload_bytes`."""
    return (count + PAYLOAD_ALIGNMENT - 1) // PAYLOAD_ALIGNMENT * PAYLOAD_ALIGNMENT


@triton.jit
def load_piece(
    message,
    scales,
    offset,
    count,
    block,
    within,
    E4M3: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of a piece in FP32. Behind the piece's end lie the zeros of its padding, which keep the load whole."""
    payload = payload_bytes(count)
    bits = tl.load(message + offset + within, mask=within < payload, other=0)
    values = bits.to(tl.float8e4nv if E4M3 else tl.float8e5, bitcast=True).to(tl.float32)
    scale_place = scales + (offset + payload) // 4
    if TENSORWISE:
        values = values * tl.load(scale_place)
    else:
        values = values * tl.load(scale_place + block, mask=block * BLOCK < count, other=0.0)[:, None]
    return values


@triton.jit
def store_piece(
    values,  # float32 [TILE_BLOCKS, BLOCK]
    amax_bits,  # int32 [TILE_BLOCKS], magnitude bits
    message,
    scales,
    offset,
    count,
    block,
    within,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    end=None,
):
    """Cast a tile by the amax of its blocks and store it and its inverse scales, up to block `end` if there is one."""
    scale, inverse = scale_from_bits(amax_bits, LIMIT, POWER_OF_TWO)
    payload = payload_bytes(count)
    bits = to_bits(values * scale[:, None], E4M3, LIMIT)
    if TENSORWISE:  # none for an empty piece, where the next one's payload lies
        slots = tl.where(count > 0, SLOTS_ALIGNMENT, 0)
    else:
        slots = (count + SLOTS_ALIGNMENT * BLOCK - 1) // (SLOTS_ALIGNMENT * BLOCK) * SLOTS_ALIGNMENT
    stored = within < payload
    if end is not None:
        stored = stored & (block < end)[:, None]
        slots = tl.minimum(slots, end)
    tl.store(message + offset + within, bits, mask=stored)
    tl.store(scales + (offset + payload) // 4 + block, inverse, mask=block < slots)


@triton.jit
def encode_kernel(
    x,
    partials,  # float32 [partial_count], the largest of which is the amax of x, where TENSORWISE
    partial_count,
    message,  # uint8 [bytes]
    scales,  # the same memory as float32
    table,  # int64 [pieces, 3], where not EVEN
    total,
    count,
    size,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    TENSORWISE: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program casts one tile of one piece."""
    start, count, offset = piece_place(tl.program_id(1).to(tl.int64), table, count, size, EVEN, UNIT)
    block, within = tile_place(tl.program_id(0), BLOCK, TILE_BLOCKS)
    inside = (within < count) & (start + within < total)
    values = tl.load(x + start + within, mask=inside, other=0.0).to(tl.float32)
    if TENSORWISE:
        amax_bits = tl.zeros([TILE_BLOCKS], tl.int32) + largest_partial(
            partials, partial_count, PARTIALS_BLOCK
        )
    else:
        amax_bits = tl.max(magnitude_bits(values), 1)
    store_piece(
        values,
        amax_bits,
        message,
        scales,
        offset,
        count,
        block,
        within,
        E4M3,
        LIMIT,
        POWER_OF_TWO,
        TENSORWISE,
        BLOCK,
    )


@triton.jit
def encode_part_kernel(
    x,
    message,  # uint8 [bytes]
    scales,  # the same memory as float32
    part,  # values of x in each piece
    first,  # the block of a piece that x begins at
    end,  # the block behind its last, the padding included where nothing follows
    count,
    size,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program casts one tile of one part of a tensor."""
    piece = tl.program_id(1).to(tl.int64)
    block, within = tile_place(tl.program_id(0), BLOCK, TILE_BLOCKS)
    values = tl.load(x + piece * part + within, mask=within < part, other=0.0).to(tl.float32)
    store_piece(
        values,
        tl.max(magnitude_bits(values), 1),
        message,
        scales,
        piece * size,
        count,
        block + first,
        within + first * BLOCK,
        E4M3,
        LIMIT,
        POWER_OF_TWO,
        False,
        BLOCK,
        end,
    )


@triton.jit
def decode_kernel(
    message,
    scales,
    x,
    table,
    peers,  # int64 [PEERS], where PEERS: see `Peers`
    shift,
    own,
    total,
    count,
    size,
    E4M3: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    PEERS: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program decodes one tile of one piece."""
    if PEERS:  # neighbours read from different peers, and the GPUs begin with different ones: no link waits for another
        tile = tl.program_id(0) // PEERS
        piece = ((tl.program_id(0) + own) % PEERS).to(tl.int64)
        message, scales = peer_message(peers, piece, shift)
        start, offset = piece * count, tl.full([], 0, tl.int64)
    else:
        tile = tl.program_id(0)
        start, count, offset = piece_place(tl.program_id(1).to(tl.int64), table, count, size, EVEN, UNIT)
    block, within = tile_place(tile, BLOCK, TILE_BLOCKS)
    values = load_piece(message, scales, offset, count, block, within, E4M3, TENSORWISE, BLOCK)
    inside = (within < count) & (start + within < total)
    tl.store(x + start + within, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    message,
    scales,
    x,  # of the dtype of the result, where not ENCODE
    out_message,  # uint8, where ENCODE
    out_scales,
    peers,  # int64 [PIECES], where PEERS: see `Peers`
    shift,
    total,
    count,
    size,
    factor,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PIECES: tl.constexpr,
    PEERS: tl.constexpr,
    ENCODE: tl.constexpr,
    TENSORWISE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
):
    """Each program adds the same tile of every piece, first piece to last, and stores the values or their message."""
    block, within = tile_place(tl.program_id(0), BLOCK, TILE_BLOCKS)
    values = tl.zeros([TILE_BLOCKS, BLOCK], tl.float32)
    for piece in tl.static_range(PIECES):
        if PEERS:
            message, scales = peer_message(peers, piece, shift)
            offset = tl.full([], 0, tl.int64)
        else:
            offset = tl.full([], piece, tl.int64) * size
        values += load_piece(message, scales, offset, count, block, within, E4M3, TENSORWISE, BLOCK)
    values *= factor
    if ENCODE:
        store_piece(
            values,
            tl.max(magnitude_bits(values), 1),
            out_message,
            out_scales,
            0,
            count,
            block,
            within,
            E4M3,
            LIMIT,
            POWER_OF_TWO,
            TENSORWISE,
            BLOCK,
        )
    else:
        tl.store(x + within, values.to(x.dtype.element_ty), mask=within < total)


TILE_VALUES = 4096
WARPS = 4
SUM_WARPS = 8
"""By time on an H200: encode and decode then run at 4.0 TB/s, sums at 3.8."""

TENSORWISE_BLOCK = 1024
"""Row of a tile where one scale serves all blocks."""

_NO_PEERS = Peers(None, 0, 0)


def _tile(layout: Layout, warps: int = WARPS) -> dict[str, int | bool]:
    block = layout.block_size or TENSORWISE_BLOCK
    return {
        "TENSORWISE": layout.block_size is None,
        "BLOCK": block,
        "TILE_BLOCKS": max(1, TILE_VALUES // block),
        "num_warps": warps,
        "enable_fp_fusion": False,
    }


def _grid(layout: Layout) -> tuple[int, int]:
    """Tiles of the longest piece, its unused scales included, by pieces."""
    longest = max(layout.counts)
    values = (
        layout.scale_count(longest) * layout.block_size
        if layout.block_size
        else layout.payload_bytes(longest)
    )
    tile = _tile(layout)
    return ceil_div(values, tile["BLOCK"] * tile["TILE_BLOCKS"]), len(layout.counts)


def _unit(layout: Layout) -> int:
    """What all pieces are multiples of: by 16, the compiler may move 16 values at once."""
    return ALIGNMENT if all(count % ALIGNMENT == 0 for count in layout.counts) else 1


def _table(layout: Layout, device: torch.device) -> torch.Tensor | None:
    """Starts, counts and offsets of uneven pieces, int64 [pieces, 3]; copied from pinned memory, so without a sync."""
    if layout.is_even:
        return None
    table = torch.tensor([layout.starts, layout.counts, layout.offsets], dtype=torch.int64).t().contiguous()
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def encode(
    values: torch.Tensor, message: torch.Tensor, layout: Layout, dtype: torch.dtype, power_of_two: bool
) -> None:
    """What `block_cast.Reference.encode` computes, byte for byte."""
    if layout.bytes == 0:
        return
    partials = amax_partials(values.view(1, -1)) if layout.block_size is None else None
    partial_count = 1 if partials is None else partials.numel()
    encode_kernel[_grid(layout)](
        values,
        partials,
        partial_count,
        message,
        message.view(torch.float32),
        _table(layout, values.device),
        values.numel(),
        layout.counts[0],
        layout.sizes[0],
        E4M3=dtype is formats.E4M3,
        LIMIT=formats.MAX[dtype],
        POWER_OF_TWO=power_of_two,
        EVEN=layout.is_even,
        UNIT=_unit(layout),
        PARTIALS_BLOCK=1 << (partial_count - 1).bit_length(),
        **_tile(layout),
    )


def encode_parts(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    layout: Layout,
    dtype: torch.dtype,
    power_of_two: bool,
) -> None:
    """What `block_cast.Reference.encode_parts` computes, byte for byte."""
    block, pieces = layout.block_size, len(layout.counts)
    if len(tensors) == 1 or block is None:
        encode(side_by_side(tensors, pieces), message, layout, dtype, power_of_two)
        return
    of_blocks = list(takewhile(lambda tensor: tensor.numel() // pieces % block == 0, tensors))
    others = tensors[len(of_blocks) :]
    parts = [*of_blocks, side_by_side(others, pieces)] if others else of_blocks
    first, in_floats, tile = 0, message.view(torch.float32), _tile(layout)
    del tile["TENSORWISE"]
    for tensor in parts:
        part = tensor.numel() // pieces
        end = layout.scale_count(layout.counts[0]) if tensor is parts[-1] else first + part // block
        encode_part_kernel[(ceil_div(end - first, tile["TILE_BLOCKS"]), pieces)](
            tensor,
            message,
            in_floats,
            part,
            first,
            end,
            layout.counts[0],
            layout.sizes[0],
            E4M3=dtype is formats.E4M3,
            LIMIT=formats.MAX[dtype],
            POWER_OF_TWO=power_of_two,
            **tile,
        )
        first = end


def _places(message: Message) -> tuple[torch.Tensor | None, torch.Tensor | None, Peers]:
    """The arguments that say where a message's pieces lie: its bytes, the same as float32, and the peers."""
    if isinstance(message, Peers):
        return None, None, message
    return message, message.view(torch.float32), _NO_PEERS


def decode(message: Message, values: torch.Tensor, layout: Layout, dtype: torch.dtype) -> None:
    """What `block_cast.Reference.decode` computes, byte for byte."""
    if layout.bytes == 0:
        return
    tiles, pieces = _grid(layout)
    in_bytes, in_floats, (peers, shift, own) = _places(message)
    decode_kernel[(tiles, pieces) if peers is None else (tiles * pieces,)](
        in_bytes,
        in_floats,
        values,
        _table(layout, values.device),
        peers,
        shift,
        own,
        values.numel(),
        layout.counts[0],
        layout.sizes[0],
        E4M3=dtype is formats.E4M3,
        EVEN=layout.is_even,
        UNIT=_unit(layout),
        PEERS=0 if peers is None else pieces,
        **_tile(layout),
    )


def decode_sum(
    messages: Message, values: torch.Tensor, layout: Layout, dtype: torch.dtype, factor: float
) -> None:
    """What `block_cast.Reference.decode_sum` computes, byte for byte."""
    _sum(messages, values, None, layout, dtype, False, factor)


def decode_sum_encode(
    messages: Message,
    message: torch.Tensor,
    layout: Layout,
    dtype: torch.dtype,
    power_of_two: bool,
    factor: float,
) -> None:
    """What `block_cast.Reference.decode_sum_encode` computes, byte for byte."""
    _sum(messages, None, message, layout, dtype, power_of_two, factor)


def _sum(
    messages: Message,
    values: torch.Tensor | None,
    message: torch.Tensor | None,
    layout: Layout,
    dtype: torch.dtype,
    power_of_two: bool,
    factor: float,
) -> None:
    tiles, pieces = _grid(layout)
    in_bytes, in_floats, (peers, shift, _) = _places(messages)
    sum_kernel[(tiles,)](
        in_bytes,
        in_floats,
        values,
        message,
        None if message is None else message.view(torch.float32),
        peers,
        shift,
        0 if values is None else values.numel(),
        layout.counts[0],
        layout.sizes[0],
        factor,
        E4M3=dtype is formats.E4M3,
        LIMIT=formats.MAX[dtype],
        POWER_OF_TWO=power_of_two,
        PIECES=pieces,
        PEERS=peers is not None,
        ENCODE=message is not None,
        **_tile(layout, SUM_WARPS),
    )

"""Rotary position embedding on a GPU: a program handles the heads of a token, whose angles it loads once."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import MOST_LAUNCHES, Launch, block_over, launch, new_partials, processors

PROGRAMS = 8  # a processor, in backward
TILE_VALUES = 2048


@triton.jit
def load_pairs(x, inside, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Load the first and the second of the pairs of rows of 2 `half` values, FP32 [rows, HALF] each.

    Args:
        x: pointers to the rows' first values, [rows, 1].
        inside: bool [rows, 1].
    """
    if INTERLEAVED:  # neighbours are loaded as one row, in whole vectors, and parted in registers
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(x + column, mask=inside & (column < 2 * half), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (both.shape[0], HALF, 2)))
    column = tl.arange(0, HALF)[None, :]
    within = inside & (column < half)
    x1 = tl.load(x + column, mask=within, other=0.0).to(tl.float32)
    return x1, tl.load(x + column + half, mask=within, other=0.0).to(tl.float32)


@triton.jit
def store_pairs(x, x1, x2, inside, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Store pairs where `load_pairs` loads them, in the pointers' dtype already."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(x1, x2), (x1.shape[0], 2 * HALF))
        tl.store(x + column, both, mask=inside & (column < 2 * half))
    else:
        column = tl.arange(0, HALF)[None, :]
        tl.store(x + column, x1, mask=inside & (column < half))
        tl.store(x + column + half, x2, mask=inside & (column < half))


@triton.jit
def angles(cos, sin, place, half, INTERLEAVED: tl.constexpr, HALF: tl.constexpr):
    """Return (cos1, cos2, sin1, sin2) of the pairs, float32 [1, HALF] each; `place` is the token's first angle."""
    first = place + tl.zeros([1, 1], tl.int32)
    inside = tl.full([1, 1], True, tl.int1)
    cos1, cos2 = load_pairs(cos + first, inside, half, INTERLEAVED, HALF)
    sin1, sin2 = load_pairs(sin + first, inside, half, INTERLEAVED, HALF)
    return cos1, cos2, sin1, sin2


@triton.jit
def place_of(head, in_group, of_group, GROUPED: tl.constexpr):
    """Return the place of a head, where each group has `in_group` such heads among its `of_group` heads."""
    return head // in_group * of_group + head % in_group if GROUPED else head


@triton.jit
def rotate_kernel(
    qkv,
    cos,
    sin,
    heads,
    all_heads,
    in_group,  # of the heads
    of_group,  # of all heads
    size,
    half,  # of what is rotated of a head
    angle_tokens,
    INTERLEAVED: tl.constexpr,
    INTERLEAVED_ANGLES: tl.constexpr,
    GROUPED: tl.constexpr,
    LAST: tl.constexpr,  # whether the last of a head's places are rotated
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each program rotates one token; angles repeat after `angle_tokens` tokens."""
    if LAST:
        qkv += size - 2 * half
    token = tl.program_id(0).to(tl.int64)
    place = (token % angle_tokens) * (2 * half)
    cos1, cos2, sin1, sin2 = angles(cos, sin, place, half, INTERLEAVED_ANGLES, HALF)
    for first in tl.range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = head < heads
        x = qkv + token * all_heads * size + place_of(head, in_group, of_group, GROUPED) * size
        # in place: a program has both values of a pair in registers before it stores one
        x1, x2 = load_pairs(x, inside, half, INTERLEAVED, HALF)
        y1 = (x1 * cos1 - x2 * sin1).to(qkv.dtype.element_ty)
        y2 = (x2 * cos2 + x1 * sin2).to(qkv.dtype.element_ty)
        store_pairs(x, y1, y2, inside, half, INTERLEAVED, HALF)


@triton.jit
def back_heads(
    source,  # the token's first value
    head_stride,
    target,
    heads,  # (of the token, of a group, of a group with q, k and v together)
    size,
    half,
    turns,  # of `angles`
    largest,
    ROTATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPED: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Copy 2 `half` values of a token's heads to `target`, whose heads have `size`, rotated back if asked.

    Returns:
        The magnitudes' running maximum.
    """
    count, in_group, of_group = heads
    cos1, cos2, sin1, sin2 = turns
    for first in tl.range(0, count, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = head < count
        x1, x2 = load_pairs(source + head.to(tl.int64) * head_stride, inside, half, INTERLEAVED, HALF)
        if ROTATE:  # the transposed rotation, which with angles of a pair's own is no rotation by -angle
            x1, x2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
        x1, x2 = x1.to(target.dtype.element_ty), x2.to(target.dtype.element_ty)
        place = place_of(head, in_group, of_group, GROUPED)
        store_pairs(target + place * size, x1, x2, inside, half, INTERLEAVED, HALF)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(x1), magnitude_bits(x2)))
    return largest


@triton.jit
def back_rotated_heads(
    source,
    head_stride,
    target,
    heads,
    size,
    half,
    turns,
    largest,
    PARTIAL: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUPED: tl.constexpr,
    LAST: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Call `back_heads` for whole heads, of which 2 `half` values were rotated."""
    if PARTIAL:
        rest, rest_target = source, target
        if LAST:
            source += size - 2 * half
            target += size - 2 * half
        else:
            rest += 2 * half
            rest_target += 2 * half
        left = size // 2 - half
        largest = back_heads(
            rest, head_stride, rest_target, heads, size, left, turns, largest, False, False, GROUPED, HALF, HEADS
        )
    return back_heads(
        source, head_stride, target, heads, size, half, turns, largest, True, INTERLEAVED, GROUPED, HALF, HEADS
    )


@triton.jit
def rotate_back_kernel(
    dq,
    dk,
    dv,
    cos,
    sin,
    dqkv,
    partials,
    tokens,
    sequence,
    query_heads,
    key_heads,
    queries_in_group,
    keys_in_group,
    size,
    half,  # of what is rotated of a head
    angle_tokens,
    q_batch,
    q_token,
    q_head,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    PARTIAL: tl.constexpr,  # whether heads are longer
    INTERLEAVED: tl.constexpr,
    INTERLEAVED_ANGLES: tl.constexpr,
    GROUPED: tl.constexpr,
    LAST: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each program takes every num_programs-th token."""
    of_group = queries_in_group + 2 * keys_in_group
    queries, keys = (query_heads, queries_in_group, of_group), (key_heads, keys_in_group, of_group)
    largest = tl.zeros([HEADS, HALF], tl.int32)
    for index in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.zeros([1, 1], tl.int64) + index
        batch, position = token // sequence, token % sequence
        place = (token % angle_tokens) * (2 * half)
        turns = angles(cos, sin, place, half, INTERLEAVED_ANGLES, HALF)
        out = dqkv + token * ((query_heads + 2 * key_heads) * size)
        q = dq + batch * q_batch + position * q_token
        largest = back_rotated_heads(
            q, q_head, out, queries, size, half, turns, largest, PARTIAL, INTERLEAVED, GROUPED, LAST, HALF, HEADS
        )
        out += queries_in_group * size
        k = dk + batch * k_batch + position * k_token
        largest = back_rotated_heads(
            k, k_head, out, keys, size, half, turns, largest, PARTIAL, INTERLEAVED, GROUPED, LAST, HALF, HEADS
        )
        out += keys_in_group * size
        v = dv + batch * v_batch + position * v_token
        largest = back_heads(v, v_head, out, keys, size, size // 2, turns, largest, False, False, GROUPED, HALF, HEADS)
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


def _tile(half: int, heads: int) -> dict[str, int]:
    """Return the constants of a tile: half a head a row; as many heads as fill it."""
    width = block_over(half)
    return {"HALF": width, "HEADS": min(block_over(heads), max(1, TILE_VALUES // width))}


def rotate_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    *,
    interleaved: bool = False,
    interleaved_angles: bool = False,
    groups: int = 1,
    last: bool = False,
) -> None:
    """Compute `rotate`."""
    batches, sequence, all_heads, size = qkv.shape
    half = cos.shape[-1] // 2
    numbers = (heads, all_heads, heads // groups, all_heads // groups, size, half, cos.shape[0] * sequence)
    options = {
        "INTERLEAVED": interleaved,
        "INTERLEAVED_ANGLES": interleaved_angles,
        "GROUPED": groups > 1,
        "LAST": last,
    }
    launch(rotate_kernel, batches * sequence, (qkv, cos, sin), numbers, **options, **_tile(half, heads))


def rotate_back_triton(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, **form: bool | int
) -> tuple[Tensor, Tensor]:
    """Compute `rotate_back`."""
    launch, programs = _back_launch(
        dq.shape, dk.shape[2], cos.shape, (*dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]), dq.device, **form
    )
    partials = new_partials(programs, dq)
    dqkv = dq.new_empty((*dq.shape[:2], dq.shape[2] + 2 * dk.shape[2], dq.shape[3]))
    launch(programs, dq, dk, dv, cos, sin, dqkv, partials)
    return dqkv, partials


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _back_launch(
    shape: tuple[int, ...],
    key_heads: int,
    angles_shape: tuple[int, ...],
    strides: tuple[int, ...],
    device: torch.device,
    *,
    interleaved: bool = False,
    interleaved_angles: bool = False,
    groups: int = 1,
    last: bool = False,
) -> tuple[Launch, int]:
    """Return the launch of `rotate_back_kernel` and its number of programs."""
    batches, sequence, query_heads, size = shape
    tokens, half = batches * sequence, angles_shape[-1] // 2
    programs = min(tokens, PROGRAMS * processors(device))
    of_heads = query_heads, key_heads, query_heads // groups, key_heads // groups
    launch = Launch(
        rotate_back_kernel,
        (tokens, sequence, *of_heads, size, half, angles_shape[0] * sequence, *strides),
        PARTIAL=2 * half < size,
        INTERLEAVED=interleaved,
        INTERLEAVED_ANGLES=interleaved_angles,
        GROUPED=groups > 1,
        LAST=last,
        **_tile(size // 2, query_heads),  # values' heads are copied whole
    )
    return launch, programs

"""Rotary position embedding on a GPU: a program handles the heads of a token, whose angles it loads once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.amax_partials import new_partials, processors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import launch

PROGRAMS = 8
"""A processor, in backward."""

TILE_VALUES = 2048


@triton.jit
def angles(cos, sin, place, half, HALF: tl.constexpr):
    """Cos and sin of both halves of a head, float32 [1, HALF] each; `place` is the token's first angle."""
    first = place + tl.arange(0, HALF)[None, :]
    inside = tl.arange(0, HALF)[None, :] < half
    return (
        tl.load(cos + first, mask=inside, other=0.0).to(tl.float32),
        tl.load(cos + first + half, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + first, mask=inside, other=0.0).to(tl.float32),
        tl.load(sin + first + half, mask=inside, other=0.0).to(tl.float32),
    )


@triton.jit
def rotate_kernel(qkv, cos, sin, heads, all_heads, half, angle_tokens, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Each program rotates one token; angles repeat after `angle_tokens` tokens."""
    token = tl.program_id(0).to(tl.int64)
    cos1, cos2, sin1, sin2 = angles(cos, sin, (token % angle_tokens) * (2 * half), half, HALF)
    column = tl.arange(0, HALF)[None, :]
    for first in tl.range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (column < half)
        place = qkv + token * all_heads * (2 * half) + head * (2 * half) + column
        x1 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, (x1 * cos1 - x2 * sin1).to(qkv.dtype.element_ty), mask=inside)
        tl.store(place + half, (x2 * cos2 + x1 * sin2).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def back_heads(
    source,  # the token's first value
    head_stride,
    target,
    heads,
    half,
    cos1,
    cos2,
    sin1,
    sin2,
    largest,
    ROTATE: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Copy a token's heads to `target`, rotated back if asked; returns the magnitudes' running maximum."""
    column = tl.arange(0, HALF)[None, :]
    for first in tl.range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (column < half)
        place = source + head.to(tl.int64) * head_stride + column
        d1 = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        d2 = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
        if ROTATE:
            x1, x2 = d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1
        else:
            x1, x2 = d1, d2
        x1, x2 = x1.to(target.dtype.element_ty), x2.to(target.dtype.element_ty)
        out = target + head * (2 * half) + column
        tl.store(out, x1, mask=inside)
        tl.store(out + half, x2, mask=inside)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(x1), magnitude_bits(x2)))
    return largest


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
    half,
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
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Each program takes every num_programs-th token."""
    largest = tl.zeros([HEADS, HALF], tl.int32)
    size = (query_heads + 2 * key_heads) * (2 * half)
    for index in tl.range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.zeros([1, 1], tl.int64) + index
        batch, position = token // sequence, token % sequence
        cos1, cos2, sin1, sin2 = angles(cos, sin, (token % angle_tokens) * (2 * half), half, HALF)
        out = dqkv + token * size
        source = dq + batch * q_batch + position * q_token
        largest = back_heads(source, q_head, out, query_heads, half, cos1, cos2, sin1, sin2, largest, True, HALF, HEADS)
        out += query_heads * (2 * half)
        source = dk + batch * k_batch + position * k_token
        largest = back_heads(source, k_head, out, key_heads, half, cos1, cos2, sin1, sin2, largest, True, HALF, HEADS)
        out += key_heads * (2 * half)
        source = dv + batch * v_batch + position * v_token
        largest = back_heads(source, v_head, out, key_heads, half, cos1, cos2, sin1, sin2, largest, False, HALF, HEADS)
    tl.store(partials + tl.program_id(0), tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True))


def _tile(half: int, heads: int) -> dict[str, int]:
    """Half a head a row; as many heads as fill a tile."""
    width = 1 << (half - 1).bit_length()
    return {"HALF": width, "HEADS": min(1 << (heads - 1).bit_length(), max(1, TILE_VALUES // width))}


def rotate_triton(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """`rotate`."""
    batches, sequence, all_heads, size = qkv.shape
    launch(
        rotate_kernel,
        batches * sequence,
        (qkv, cos, sin),
        (heads, all_heads, size // 2, cos.shape[0] * sequence),
        **_tile(size // 2, heads),
    )


def rotate_back_triton(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`rotate_back`."""
    batches, sequence, query_heads, size = dq.shape
    key_heads = dk.shape[2]
    tokens = batches * sequence
    programs = min(tokens, PROGRAMS * processors(dq.device))
    partials = new_partials(programs, dq)
    dqkv = dq.new_empty((batches, sequence, query_heads + 2 * key_heads, size))
    strides = [stride for gradient in (dq, dk, dv) for stride in gradient.stride()[:3]]
    launch(
        rotate_back_kernel,
        programs,
        (dq, dk, dv, cos, sin, dqkv, partials),
        (tokens, sequence, query_heads, key_heads, size // 2, cos.shape[0] * sequence, *strides),
        **_tile(size // 2, query_heads),
    )
    return dqkv, partials

"""Adam's update with one-byte moments on a GPU: one launch for many tensors, each byte read and written once."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from fp8booster.kernels.adamw import AdamRates
from fp8booster.kernels.adamw_8bit import (
    AMAX,
    BLOCK,
    GRADIENT,
    LARGEST,
    MOST_OCTAVES,
    NAN,
    STEPS,
    Shards8bit,
    step_rows,
)
from fp8booster.kernels.group_codes_triton import decode_roots, encode_roots, to_integers
from fp8booster.kernels.launch import ceil_div
from fp8booster.kernels.tables_triton import launch_over, own_entry, own_pointer, own_size

# blocks that a program updates, and its warps, by time on an H200 (benchmarks/results/h200/adamw-8bit.md): a warp alone
# finds the ranges of its block without waiting for others
_BLOCKS, _WARPS = 1, 1

_LARGEST, _SPAN, _STEPS, _NAN = (tl.constexpr(each) for each in (LARGEST, MOST_OCTAVES << 23, STEPS, NAN))
_ADDRESS = tl.constexpr(GRADIENT // 2)  # in a row, counted by 64 bits


@triton.jit
def adamw_8bit_kernel(
    entries,  # of values, lows, firsts, amaxes, seconds, ranges and the count of values
    owners,
    values,
    lows,  # int16, or the values again where they are FP32 and nothing is lacking
    firsts,
    amaxes,
    seconds,
    ranges,
    gradients,
    rows,  # float32 [shards, 8], see `adamw_8bit.step_rows`
    skipped,
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    eps,
    DECOUPLED: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program updates BLOCKS rows of BLOCK values; compiled so that no product and sum are rounded as one."""
    entry, shard, program = own_entry(entries, owners, 7)
    row = rows + 8 * shard
    values = own_pointer(entry, 0, values, ALIGNED)
    lows = own_pointer(entry, 1, lows, ALIGNED)
    firsts = own_pointer(entry, 2, firsts, ALIGNED)
    amaxes = own_pointer(entry, 3, amaxes, ALIGNED)
    seconds = own_pointer(entry, 4, seconds, ALIGNED)
    ranges = own_pointer(entry, 5, ranges, ALIGNED)
    count = own_size(entry, 6, ALIGNED)
    gradients = own_pointer(row.to(tl.pointer_type(tl.int64), bitcast=True), _ADDRESS, gradients, ALIGNED)
    decay, step_size, inverse_root = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    seed = tl.load((row + 3).to(tl.pointer_type(tl.int32), bitcast=True))
    amax = (row + 4).to(tl.pointer_type(tl.int32), bitcast=True)
    found, inverse_divisor = tl.load(amax), tl.load(row + 5)
    # offsets of 32 bits from where the program's values begin
    first_block = program.to(tl.int64) * BLOCKS
    start = first_block * BLOCK
    if start >= count:  # of the last run of programs some have nothing to do
        return
    left = tl.minimum(count - start, BLOCKS * BLOCK).to(tl.int32)
    block = tl.arange(0, BLOCKS)
    index = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside, exists = index < left, block * BLOCK < left
    values += start
    gradients += start
    firsts += start
    seconds += start
    amaxes += first_block
    ranges += 2 * first_block

    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32) * inverse_divisor
    # finite: not the largest exponent
    finite = (gradient.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    updated = tl.where(inverse_divisor > 0, tl.min(finite.to(tl.int32), 1), 0) > 0
    if (
        lows.dtype.element_ty == tl.int16
    ):  # the master of 32 bits from a BF16 weight and what rounding took from it: 4 bytes a value, not 6
        lows += start
        high = tl.load(values + index, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        low = tl.load(lows + index, mask=inside, other=0).to(tl.int32)
        low = tl.where((high & 0x7FFF) == 0, tl.maximum(low, 0), low)  # a weight that was set to 0 since
        value = ((high - (low < 0).to(tl.int32)) * 65536 + (low & 0xFFFF)).to(tl.float32, bitcast=True)
    else:
        value = tl.load(values + index, mask=inside, other=0.0)
    before = value  # written again where the block is left as it is
    first_amax = tl.load(amaxes + block, mask=exists, other=0.0)
    mean = decode_roots(tl.load(firsts + index, mask=inside, other=0), first_amax, 1)
    # `decode_second`, in registers: moments are in FP32 only here
    least = tl.load(ranges + 2 * block, mask=exists, other=0)
    step = tl.load(ranges + 2 * block + 1, mask=exists, other=0)
    code = tl.load(seconds + index, mask=inside, other=0).to(tl.int32)
    bits = tl.minimum(least[:, None] + (code - 1) * step[:, None], _LARGEST)
    square = tl.where(code > 0, bits, 0).to(tl.float32, bitcast=True)

    # the order and the roundings of `next_moments`: eager code on the CPU resumes what a GPU wrote, with the same bits
    if DECOUPLED:
        value -= decay * value
    else:
        gradient += decay * value
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + (rest2 * gradient) * gradient
    value -= tl.math.div_rn(step_size * mean, tl.math.sqrt_rn(square) * inverse_root + eps)

    first, new_amax = encode_roots(tl.where(inside, mean, 0.0), 1)

    # `encode_second`
    bits = tl.where(inside, tl.minimum(square.to(tl.int32, bitcast=True), _LARGEST), 0)
    largest = tl.max(bits, 1)
    least = tl.min(tl.where(bits > 0, bits, _LARGEST), 1)
    least = tl.minimum(tl.maximum(least, largest - _SPAN), largest)
    step = tl.maximum((largest - least + (_STEPS - 1)) // _STEPS, 1)
    inverse = tl.math.div_rn(tl.full((BLOCKS,), 1.0, tl.float32), step.to(tl.float32))
    above = tl.maximum(bits - least[:, None], 0).to(tl.float32) * inverse[:, None]
    # murmur3's finalizer of place and seed: no state, so the order of programs does not matter
    x = (index.to(tl.uint32) + start.to(tl.uint32)) * 0x9E3779B1 + seed.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    # 23 random bits as the fraction of a number from 1 to 2
    chance = (((x ^ (x >> 16)) >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 1.5
    second = tl.where(bits > 0, to_integers(tl.minimum(above + chance, 1.0 * _STEPS)) + 1, 0)

    # a block that is left keeps its bytes: decoded and encoded again they would be rounded by chance once more
    writes = exists & updated
    tl.store(amaxes + block, new_amax, mask=writes)
    tl.store(ranges + 2 * block, least, mask=writes)
    tl.store(ranges + 2 * block + 1, step, mask=writes)
    inside &= updated[:, None]
    tl.store(firsts + index, first.to(tl.int8), mask=inside)
    tl.store(seconds + index, second.to(tl.uint8), mask=inside)
    value = tl.where(updated[:, None], value, before)
    bits = value.to(tl.int32, bitcast=True)
    if lows.dtype.element_ty == tl.int16:
        bits = tl.where(value != value, _NAN, bits)
        rounded = (bits + 0x8000) >> 16
        tl.store(values + index, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=inside)
        tl.store(lows + index, bits.to(tl.int16), mask=inside)
        bits = rounded << 16
    else:
        tl.store(values + index, value, mask=inside)
    # magnitudes are ordered as their bits are
    largest = tl.max(tl.max(bits & 0x7FFFFFFF, 1), 0)
    if largest > found:  # which others may have raised since: few blocks have the largest so far
        tl.atomic_max(amax, largest, sem="relaxed")
    kept = tl.sum((exists & (updated == 0)).to(tl.int32), 0)
    if kept > 0:
        tl.atomic_add(skipped, kept, sem="relaxed")


def _programs(counts: np.ndarray) -> np.ndarray:
    return ceil_div(counts, BLOCK * _BLOCKS)


def update_8bit_triton(
    shards: Shards8bit, rates: AdamRates, skipped: torch.Tensor, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `update_8bit`, byte for byte."""
    shards.require_updatable()
    rows = step_rows(shards, rates, divisor)
    values = shards.values
    lows = [value if low is None else low for value, low in zip(values, shards.lows, strict=True)]
    beta1, beta2 = rates.betas
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, rates.denominator_eps())
    launch_over(
        adamw_8bit_kernel,
        (values, lows, *zip(*shards.moments, strict=True)),
        [list(map(torch.Tensor.numel, values))],
        _programs,
        (rows, skipped),
        tuple(map(float, numbers)),
        moving=[shards.gradients],
        num_warps=_WARPS,
        enable_fp_fusion=False,
        DECOUPLED=rates.decoupled,
        BLOCKS=_BLOCKS,
        BLOCK=BLOCK,
    )
    torch.autograd.graph.increment_version(values)
    return rows.select(1, AMAX)  # quicker than by an index

"""Adam's update on a GPU: one launch for all tensors, each byte read once and written once."""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.adamw import AdamRates, AdamShards, factors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import ceil_div
from fp8booster.kernels.tables_triton import launch_over, own_entry, own_pointer, own_size

# by time on an H200: 3.97 TB/s where a copy runs at 4.24 (benchmarks/results/h200/adamw)
_BLOCK, _WARPS = 1024, 4


@triton.jit
def adamw_kernel(
    entries,  # of values, gradients, exp_avg, exp_avg_sq and their count
    owners,
    values,
    gradients,
    exp_avg,
    exp_avg_sq,
    rows,  # float32 [shards, 4], see `adamw.factors`; the last takes the amax
    divisor,  # float32 [], where DIVIDES
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    eps,
    DIVIDES: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program updates BLOCK values."""
    entry, shard, program = own_entry(entries, owners, 5)
    values = own_pointer(entry, 0, values, ALIGNED)
    gradients = own_pointer(entry, 1, gradients, ALIGNED)
    exp_avg = own_pointer(entry, 2, exp_avg, ALIGNED)
    exp_avg_sq = own_pointer(entry, 3, exp_avg_sq, ALIGNED)
    row = rows + 4 * shard
    decay, step_size, root = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < own_size(entry, 4, ALIGNED)
    value = tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(exp_avg + index, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(exp_avg_sq + index, mask=inside, other=0.0).to(tl.float32)
    if DIVIDES:  # loss scale and clipping in one, on the device: the host need not wait for a norm
        gradient *= 1.0 / tl.load(divisor)
    if DECOUPLED:
        value -= decay * value
    else:
        gradient += decay * value
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    value -= step_size * mean / (tl.sqrt(square) / root + eps)
    value = value.to(values.dtype.element_ty)  # before the amax is found: a cast reads what memory holds
    tl.store(values + index, value, mask=inside)
    tl.store(exp_avg + index, mean.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + index, square.to(exp_avg_sq.dtype.element_ty), mask=inside)
    # integers, for magnitudes are ordered as their bits are and a GPU has no atomic maximum of floats that keeps NaN;
    # what lies outside comes out as NaN where the divisor is 0
    largest = tl.max(tl.where(inside, magnitude_bits(value), 0), 0)
    tl.atomic_max((row + 3).to(tl.pointer_type(tl.int32), bitcast=True), largest, sem="relaxed")


def _programs(counts: np.ndarray) -> np.ndarray:
    return ceil_div(counts, _BLOCK)


def update_triton(shards: AdamShards, rates: AdamRates, divisor: Tensor | None = None) -> Tensor:
    """Compute `update`, but for the last bits."""
    shards.require_contiguous()
    rows = factors(shards, rates)
    beta1, beta2 = rates.betas
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, rates.denominator_eps())
    launch_over(
        adamw_kernel,
        shards[:4],
        [list(map(Tensor.numel, shards.values))],
        _programs,
        (rows, rows if divisor is None else divisor),
        tuple(map(float, numbers)),
        num_warps=_WARPS,
        DIVIDES=divisor is not None,
        DECOUPLED=rates.decoupled,
        BLOCK=_BLOCK,
    )
    torch.autograd.graph.increment_version([*shards.values, *shards.exp_avgs, *shards.exp_avg_sqs])
    return rows[:, 3]

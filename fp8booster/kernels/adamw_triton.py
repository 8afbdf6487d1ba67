"""Adam's update on a GPU: one launch a tensor, each byte read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.adam_step import AdamRates, AdamShards, factors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import ceil_div, launch

_BLOCK = 1024
_WARPS = 4
"""By time on an H200: 3.97 TB/s where a copy runs at 4.24 (benchmarks/results/h200/adamw)."""


@triton.jit
def adamw_kernel(
    values,
    gradients,
    exp_avg,
    exp_avg_sq,
    row,  # float32 [4], see `adam_step.factors`; the last takes the amax
    divisor,  # float32 [], where DIVIDES
    count,
    beta1,
    rest1,  # 1 - beta1
    beta2,
    rest2,
    eps,
    DIVIDES: tl.constexpr,
    DECOUPLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program updates BLOCK values."""
    decay, step_size, root = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    value = tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    mean = tl.load(exp_avg + index, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(exp_avg_sq + index, mask=inside, other=0.0).to(tl.float32)
    if DIVIDES:
        gradient *= 1.0 / tl.load(divisor)
    if DECOUPLED:
        value -= decay * value
    else:
        gradient += decay * value
    mean = beta1 * mean + rest1 * gradient
    square = beta2 * square + rest2 * gradient * gradient
    value -= step_size * mean / (tl.sqrt(square) / root + eps)
    value = value.to(values.dtype.element_ty)
    tl.store(values + index, value, mask=inside)
    tl.store(exp_avg + index, mean.to(exp_avg.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq + index, square.to(exp_avg_sq.dtype.element_ty), mask=inside)
    # magnitudes are ordered as their bits are; what lies outside comes out as NaN where the divisor is 0
    largest = tl.max(tl.where(inside, magnitude_bits(value), 0), 0)
    tl.atomic_max((row + 3).to(tl.pointer_type(tl.int32), bitcast=True), largest, sem="relaxed")


def update_triton(shards: AdamShards, rates: AdamRates, divisor: Tensor | None = None) -> Tensor:
    """`update`, but for the last bits."""
    shards.require_contiguous()
    rows = factors(shards, rates)
    beta1, beta2 = rates.betas
    numbers = (beta1, 1 - beta1, beta2, 1 - beta2, rates.denominator_eps())
    for *tensors, row in zip(*shards[:4], rows.unbind(), strict=True):
        count = tensors[0].numel()
        if count > 0:
            launch(
                adamw_kernel,
                ceil_div(count, _BLOCK),
                (*tensors, row, row if divisor is None else divisor),
                (count, *map(float, numbers)),
                num_warps=_WARPS,
                DIVIDES=divisor is not None,
                DECOUPLED=rates.decoupled,
                BLOCK=_BLOCK,
            )
    torch.autograd.graph.increment_version([*shards.values, *shards.exp_avgs, *shards.exp_avg_sqs])
    return rows[:, 3]

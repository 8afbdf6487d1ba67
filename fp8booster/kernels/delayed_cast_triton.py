"""Casts by amaxes of earlier steps on a GPU: each program of the cast stores the amax of its tile."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import INFINITY_BITS, cast_triton, magnitude_bits
from fp8booster.kernels.launch import MOST_LAUNCHES, Launch

_BLOCK = 4096


@triton.jit
def note_kernel(
    history,
    amaxes,
    inverse_scale,
    count,
    steps,
    factor,
    NEW_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS_BLOCK: tl.constexpr,
):
    """One program writes down the largest of `count` amaxes."""
    largest = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(amaxes + index, mask=index < count, other=0.0)))
    bits = tl.max(largest, 0)
    noted = bits.to(tl.float32, bitcast=True) * factor
    noted_bits = magnitude_bits(noted)
    newest = tl.load(history)
    entry = noted if NEW_STEP else tl.maximum(newest, noted)
    entry = tl.where((noted_bits > 0) & (noted_bits < INFINITY_BITS), entry, newest)
    step = tl.arange(0, STEPS_BLOCK)
    past = tl.load(history + step, mask=step < steps, other=0.0)
    tl.debug_barrier()  # all are read before one is written over
    if NEW_STEP:
        tl.store(history + 1 + step, past, mask=step < steps)
    tl.store(history, entry)
    tl.store(inverse_scale, float("nan"), mask=bits >= INFINITY_BITS)


def cast_by_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    past: Tensor,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`cast_by`, byte for byte but for how many amaxes there are."""
    options = {"plain": plain, "transposed": transposed, "power_of_two": power_of_two}
    return cast_triton(matrix, dtype, amax=past, finds_amaxes=True, **options)


def note_amax_triton(
    history: Tensor, amaxes: Tensor, inverse_scale: Tensor, *, new_step: bool, factor: float = 1.0
) -> None:
    """`note_amax`, byte for byte."""
    amaxes = amaxes.contiguous()
    _note_launch(amaxes.numel(), history.numel() - 1, factor, new_step)(history, amaxes, inverse_scale)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _note_launch(count: int, steps: int, factor: float, new_step: bool) -> Launch:
    return Launch(
        note_kernel,
        1,
        (count, steps, float(factor)),
        NEW_STEP=new_step,
        BLOCK=min(_BLOCK, 1 << (count - 1).bit_length()),
        STEPS_BLOCK=1 << (steps - 1).bit_length(),
    )

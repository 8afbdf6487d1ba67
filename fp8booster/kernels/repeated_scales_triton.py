"""Scales of both operands written out in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.launch import ceil_div, launch

BLOCK = 1024


@triton.jit
def write_out(scale, out, place, size, times, factor):
    """Store a block of the scales of one operand, times a factor."""
    tl.store(out + place, tl.load(scale + place // times, mask=place < size) * factor, mask=place < size)


@triton.jit
def repeat_scales_kernel(scale_a, scale_b, out_a, out_b, size_a, size_b, times_a, times_b, factor, BLOCK: tl.constexpr):
    """Each program writes a block for each operand."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    write_out(scale_a, out_a, place, size_a, times_a, factor)
    write_out(scale_b, out_b, place, size_b, times_b, 1.0)


def repeat_scales_triton(
    scale_a: Tensor, size_a: int, scale_b: Tensor, size_b: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Compute `repeat_scales`."""
    a, b = scale_a.new_empty(size_a), scale_b.new_empty(size_b)
    numbers = (size_a, size_b, size_a // scale_a.numel(), size_b // scale_b.numel(), float(factor))
    launch(repeat_scales_kernel, ceil_div(max(size_a, size_b), BLOCK), (scale_a, scale_b, a, b), numbers, BLOCK=BLOCK)
    return a, b

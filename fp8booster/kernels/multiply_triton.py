"""The multiplication of a tensor by one number on a GPU: a launch that reads nothing else where the number is 1."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.launch import ceil_div, launch, processors

PROGRAMS = 8
"""A processor."""

BLOCK = 4096


@triton.jit
def multiply_kernel(x, factor, count, blocks, BLOCK: tl.constexpr):
    """Each program multiplies every num_programs-th block."""
    scale = tl.load(factor)
    if scale != 1.0:  # NaN is not 1 either
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
            tl.store(x + index, (values * scale).to(x.dtype.element_ty), mask=index < count)


def multiply_triton(tensor: Tensor, factor: Tensor) -> Tensor:
    """`multiply_`, bit for bit."""
    count = tensor.numel()
    blocks = ceil_div(count, BLOCK)
    if blocks:
        programs = min(blocks, PROGRAMS * processors(tensor.device))
        launch(multiply_kernel, programs, (tensor, factor), (count, blocks), num_warps=8, BLOCK=BLOCK)
    return tensor

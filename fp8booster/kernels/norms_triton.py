"""Euclidean norms on a GPU: one launch a tensor, of programs enough to keep memory busy, each adding its own squares.

Their sums are added in one order afterwards: a norm clips gradients, and a resumed run has to clip by the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.amax_partials import processors
from fp8booster.kernels.launch import ceil_div, launch
from fp8booster.kernels.norms import norms_of

_BLOCK = 4096
_WARPS = 8
_PROGRAMS = 4
"""For each processor."""


@triton.jit
def squares_kernel(values, partials, count, tiles, BLOCK: tl.constexpr):
    """Each program adds the squares of its tiles: every so many as there are programs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for _ in range(program, tiles, programs):
        value = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
        total += value * value
        index += programs.to(tl.int64) * BLOCK
    tl.store(partials + program, tl.sum(total, 0))


def norms_of_triton(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`norms_of`, but for the last bits; of tensors that are not contiguous or lie on several devices, by torch."""
    device = tensors[0].device
    if any(tensor.device != device or not tensor.is_contiguous() for tensor in tensors):
        return norms_of.reference(tensors)
    most = _PROGRAMS * processors(device)
    partials = torch.zeros(len(tensors), most, dtype=torch.float32, device=device)
    for tensor, row in zip(tensors, partials.unbind(), strict=True):
        count = tensor.numel()
        tiles = ceil_div(count, _BLOCK)
        if tiles > 0:
            launch(
                squares_kernel, min(tiles, most), (tensor.detach(), row), (count, tiles), num_warps=_WARPS, BLOCK=_BLOCK
            )
    return list(partials.sum(1).sqrt_().unbind())

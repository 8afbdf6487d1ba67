"""Euclidean norms on a GPU: a launch for all tensors, each with programs enough to keep memory busy, and one to add."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.launch import block_over, ceil_div, launch, processors
from fp8booster.kernels.norms import norms_of
from fp8booster.kernels.tables_triton import launch_over, own_entry, own_pointer, own_size

_BLOCK, _WARPS = 4096, 8
_PROGRAMS = 4  # for each processor


@triton.jit
def squares_kernel(
    entries,  # of values and their count
    owners,
    values,
    partials,  # float32 [tensors, MOST], zero
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Each program adds the squares of its tiles: every so many as there are programs."""
    entry, tensor, program = own_entry(entries, owners, 2)
    values, count = own_pointer(entry, 0, values, ALIGNED), own_size(entry, 1, ALIGNED)
    all_tiles = tl.cdiv(count, BLOCK).to(tl.int32)
    programs = tl.minimum(all_tiles, MOST)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    tiles = tl.where(program < programs, all_tiles, 0)
    for _ in range(program, tiles, programs):
        value = tl.load(values + index, mask=index < count, other=0.0).to(tl.float32)
        total += value * value
        index += programs.to(tl.int64) * BLOCK
    tl.store(partials + tensor * MOST + program, tl.sum(total, 0), mask=program < programs)


@triton.jit
def roots_kernel(partials, norms, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """Each program adds the partial sums of one tensor."""
    index = tl.arange(0, BLOCK)
    squares = tl.load(partials + tl.program_id(0).to(tl.int64) * MOST + index, mask=index < MOST, other=0.0)
    tl.store(norms + tl.program_id(0), tl.sqrt_rn(tl.sum(squares, 0)))


@functools.cache
def _programs_up_to(most: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda counts: np.minimum(ceil_div(counts, _BLOCK), most)


def norms_of_triton(tensors: Sequence[Tensor]) -> Tensor:
    """Compute `norms_of`, but for the last bits; of tensors that are not contiguous, by torch."""
    device = tensors[0].device
    if not all(map(Tensor.is_contiguous, tensors)):
        return norms_of.reference(tensors)
    most = _PROGRAMS * processors(device)
    partials = torch.zeros(len(tensors), most, dtype=torch.float32, device=device)
    counts = list(map(Tensor.numel, tensors))
    launch_over(
        squares_kernel,
        [tensors],
        [counts],
        _programs_up_to(most),
        (partials,),
        num_warps=_WARPS,
        MOST=most,
        BLOCK=_BLOCK,
    )
    # in one order, not by atomics: a norm clips gradients, and a resumed run has to clip by the same bits. The order of
    # torch's sums goes by their number, and so by which gradients backward happened to have.
    norms = torch.empty(len(tensors), dtype=torch.float32, device=device)
    launch(roots_kernel, len(tensors), (partials, norms), (), MOST=most, BLOCK=block_over(most))
    return norms

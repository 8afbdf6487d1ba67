"""Sums of gradients in 8 bits on a GPU: one launch decodes, adds and encodes, each byte read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.gradient_sums import require_addable
from fp8booster.kernels.group_codes import GroupCodes
from fp8booster.kernels.group_codes_triton import WIDTH, decode_tile, encode_tile
from fp8booster.kernels.launch import ceil_div, launch

_VALUES = 2048
"""Of a program, a multiple of a group's."""


@triton.jit
def _place(count, VALUES: tl.constexpr):
    """Where a program's values are, and the amaxes of their groups: (offset, mask) of each, int64 [1, ...]."""
    start = tl.program_id(0).to(tl.int64) * VALUES
    index = start + tl.arange(0, VALUES)[None, :]
    group = start // WIDTH + tl.arange(0, VALUES // WIDTH)[None, :]
    return index, index < count, group, group * WIDTH < count


@triton.jit
def add_to_sums_kernel(codes, amaxes, gradients, count, VALUES: tl.constexpr):
    """Compiled so that no product and sum are rounded as one."""
    index, inside, group, exists = _place(count, VALUES)
    amax = tl.load(amaxes + group, mask=exists, other=0.0)
    total = decode_tile(tl.load(codes + index, mask=inside, other=0), amax, 1, VALUES)
    total += tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    code, amax = encode_tile(tl.where(inside, total, 0.0), 1, VALUES)
    tl.store(codes + index, code, mask=inside)
    tl.store(amaxes + group, amax, mask=exists)


@triton.jit
def read_sums_kernel(codes, amaxes, gradients, totals, count, ADDS: tl.constexpr, VALUES: tl.constexpr):
    """As `add_to_sums_kernel`, but encodes nothing."""
    index, inside, group, exists = _place(count, VALUES)
    amax = tl.load(amaxes + group, mask=exists, other=0.0)
    total = decode_tile(tl.load(codes + index, mask=inside, other=0), amax, 1, VALUES)
    if ADDS:
        total += tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(totals + index, total.to(totals.dtype.element_ty), mask=inside)


def add_to_sums_triton(sums: GroupCodes, gradient: Tensor) -> None:
    """What `gradient_sums.add_to_sums` defines, byte for byte."""
    require_addable(sums, gradient)
    count = gradient.numel()
    if count:
        tensors, programs = (*sums, gradient), ceil_div(count, _VALUES)
        launch(add_to_sums_kernel, programs, tensors, (count,), enable_fp_fusion=False, VALUES=_VALUES)


def read_sums_triton(sums: GroupCodes, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `gradient_sums.read_sums` defines, byte for byte."""
    if gradient is not None:
        require_addable(sums, gradient)
    count = sums.codes.numel()
    totals = sums.codes.new_empty(count, dtype=dtype)
    if count:
        launch(
            read_sums_kernel,
            ceil_div(count, _VALUES),
            (*sums, totals if gradient is None else gradient, totals),
            (count,),
            enable_fp_fusion=False,
            ADDS=gradient is not None,
            VALUES=_VALUES,
        )
    return totals

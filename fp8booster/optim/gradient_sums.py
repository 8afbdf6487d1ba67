"""Sums of a tensor's gradients over micro-batches: in FP32, in BF16, or in 8 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fp8booster.kernels.code_statistics import SumSample
from fp8booster.kernels.group_codes import GroupCodes, add_to_sums, read_sums, zero_sums

GRADIENT_ACCUMULATIONS = ("32-bit", "16-bit", "8-bit")
"""Kinds of sums, as `added` describes them."""

GradientSum = Tensor | GroupCodes
"""The sum of one tensor's gradients so far."""


Observer = Callable[[int, Callable[[], SumSample]], Callable[[], None] | None]
"""Sees an addition in 8 bits to the sum of the parameter of this id, as `adamw.Observer` sees an update."""

observers: list[Observer] = []
"""Asked before each addition."""


@torch.no_grad()
def added(total: GradientSum | None, gradient: Tensor, kind: str, parameter: int = 0) -> GradientSum:
    """Return a sum with one more gradient: the given sum, changed in place, where it can be.

    Args:
        total: None where the gradient is the first.
        gradient: BF16, FP16 or FP32; it may be kept as it is.
        kind: "32-bit": FP32 from the second gradient on, the first as it is; "16-bit": BF16; "8-bit": groups of 128
            values in int8.
        parameter: the id of the one whose gradient it is, for observers; 0: of none.
    """
    if kind == "8-bit":
        codes = total if isinstance(total, GroupCodes) else zero_sums(gradient)
        # a sum that began in 16 or 32 bits goes on in codes
        if isinstance(total, Tensor):
            add_to_sums(codes, total.contiguous())
        gradient = gradient.contiguous()
        # asked before the addition, which changes the codes in place
        then = [observe(parameter, partial(SumSample, codes, gradient)) for observe in observers]
        add_to_sums(codes, gradient)
        for each in filter(None, then):
            each()
        return codes
    if total is None:
        # one gradient alone is not widened: nothing has been added yet that FP32 would keep
        return gradient.bfloat16() if kind == "16-bit" else gradient
    assert isinstance(total, Tensor)  # of another kind are codes alone
    # `to` makes a copy for the second gradient at most; from then on the sum has the type, and is added to in place
    return total.to(torch.bfloat16 if kind == "16-bit" else torch.float32).add_(gradient)


@torch.no_grad()
def value_of(total: GradientSum, gradient: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a sum, with one more gradient added in FP32: [n] of a dtype, in memory of its own or not."""
    if isinstance(total, GroupCodes):
        return read_sums(total, None if gradient is None else gradient.contiguous(), dtype)
    flat = total.flatten()
    # the last gradient need not be rounded to the sum's type: the sum is not kept after it
    return (flat if gradient is None else flat.float() + gradient.flatten()).to(dtype)

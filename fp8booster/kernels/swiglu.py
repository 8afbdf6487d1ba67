"""SwiGLU (Shazeer, arXiv 2002.05202, equation 6): the gated activation between a feed-forward block's two products.

    y = silu(gate) * up        silu(g) = g / (1 + exp(-g)), in FP32, rounded once

gate and up may be halves of one tensor, as one product of both gives them. Those that `swiglu` was asked to encode, it
takes in their place as well: then it makes y again, for a product of backward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.group_codes import GroupCodes, encode_groups, values_of
from fp8booster.kernels.operators import operator
from fp8booster.scaling import amax_of


class Activated(NamedTuple):
    """What `swiglu` gives."""

    y: Tensor
    """[M, F]"""

    amax: Tensor
    """float32, whose largest entry is the amax of y."""

    gate: GroupCodes | None
    up: GroupCodes | None
    """What it read in 8 bits; None where that was not asked for."""


@operator()
def swiglu(gate: Tensor | GroupCodes, up: Tensor | GroupCodes, *, encoded: bool = False) -> Activated:
    """The activation.

    Args:
        gate, up: [M, F], each row contiguous, BF16, FP16 or FP32; or both as an earlier call encoded them.
        encoded: give them in 8 bits too.
    """
    values = values_of(gate)
    y = (values / (1 + (-values).exp()) * values_of(up)).to(gate.dtype)
    return Activated(y, amax_of(y), *((encode_groups(gate), encode_groups(up)) if encoded else (None, None)))


@operator()
def swiglu_backward(dy: Tensor, gate: Tensor | GroupCodes, up: Tensor | GroupCodes) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, side by side.

    Args:
        dy: [M, F], contiguous.
        gate, up: as in `swiglu`.

    Returns:
        ([M, 2 F]: of gate, then of up; float32, whose largest entry is its amax).
    """
    gradient, values = dy.float(), values_of(gate)
    sigmoid = 1 / (1 + (-values).exp())
    silu = values * sigmoid
    dgate = gradient * values_of(up) * (sigmoid + silu * (1 - sigmoid))
    dx = torch.cat([dgate, gradient * silu], 1).to(gate.dtype)
    return dx, amax_of(dx)

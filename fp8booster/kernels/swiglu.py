"""SwiGLU (Shazeer, arXiv 2002.05202, equation 6): the gated activation between a feed-forward block's two products.

    y = silu(gate) * up        silu(g) = g / (1 + exp(-g)), in FP32, rounded once

gate and up may be halves of one tensor, as one product of both gives them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator
from fp8booster.scaling import amax_of


@operator()
def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The activation.

    Args:
        gate, up: [M, F], each row contiguous, BF16, FP16 or FP32.

    Returns:
        (y [M, F]; float32, whose largest entry is its amax).
    """
    values = gate.float()
    y = (values / (1 + (-values).exp()) * up.float()).to(gate.dtype)
    return y, amax_of(y)


@operator()
def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up, side by side.

    Args:
        dy: [M, F], contiguous.
        gate, up: as in `swiglu`.

    Returns:
        ([M, 2 F]: of gate, then of up; its amax as in `swiglu`).
    """
    gradient, values = dy.float(), gate.float()
    sigmoid = 1 / (1 + (-values).exp())
    silu = values * sigmoid
    dgate = gradient * up.float() * (sigmoid + silu * (1 - sigmoid))
    dx = torch.cat([dgate, gradient * silu], 1).to(gate.dtype)
    return dx, amax_of(dx)

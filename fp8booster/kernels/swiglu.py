"""SwiGLU (Shazeer, arXiv 2002.05202, equation 6): the gated activation between a feed-forward block's two products.

    y = silu(gate) * up        silu(g) = g / (1 + exp(-g)), in FP32, rounded once

`swiglu` and `swiglu_backward` are the entries; the `*_reference` functions define what they compute. gate and up may be
halves of one tensor, as one product of both gives them.
"""

from __future__ import annotations

import torch

from fp8booster.kernels.device import runs_triton
from fp8booster.scaling import amax_of


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation.

    Args:
        gate, up: [M, F], each row contiguous, BF16, FP16 or FP32.

    Returns:
        (y [M, F]; float32, whose largest entry is its amax).
    """
    if runs_triton(gate):
        from fp8booster.kernels.swiglu_triton import swiglu_triton

        return swiglu_triton(gate, up)
    return swiglu_reference(gate, up)


def swiglu_backward(dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of gate and up, side by side.

    Args:
        dy: [M, F], contiguous.
        gate, up: as in `swiglu`.

    Returns:
        ([M, 2 F]: of gate, then of up; its amax as in `swiglu`).
    """
    if runs_triton(dy):
        from fp8booster.kernels.swiglu_triton import swiglu_backward_triton

        return swiglu_backward_triton(dy, gate, up)
    return swiglu_backward_reference(dy, gate, up)


def swiglu_reference(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `swiglu` computes, in torch."""
    values = gate.float()
    y = (values / (1 + (-values).exp()) * up.float()).to(gate.dtype)
    return y, amax_of(y)


def swiglu_backward_reference(
    dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `swiglu_backward` computes, in torch."""
    gradient, values = dy.float(), gate.float()
    sigmoid = 1 / (1 + (-values).exp())
    silu = values * sigmoid
    dgate = gradient * up.float() * (sigmoid + silu * (1 - sigmoid))
    dx = torch.cat([dgate, gradient * silu], 1).to(gate.dtype)
    return dx, amax_of(dx)

"""SwiGLU of a product that gives gate and up side by side, differentiable, delivering amax to the casts that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8booster.kernels import swiglu as kernel
from fp8booster.nn.linear.delivered_amax import deliver_amax
from fp8booster.nn.linear.functional import unsafe_view


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        features = gate_up.shape[-1] // 2
        y, amax = kernel.swiglu(*_halves(gate_up))
        return deliver_amax(unsafe_view(y, (*gate_up.shape[:-1], features)), amax)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (gate_up,) = ctx.saved_tensors
        dx, amax = kernel.swiglu_backward(dy.reshape(-1, dy.shape[-1]).contiguous(), *_halves(gate_up))
        return deliver_amax(dx.view(gate_up.shape), amax)


def _halves(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up.reshape(-1, gate_up.shape[-1]).chunk(2, 1)
    return gate, up


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`; see `kernels.swiglu`.

    Args:
        gate_up: [..., 2 F], gate first.

    Returns:
        [..., F].
    """
    return _SwiGLU.apply(gate_up)

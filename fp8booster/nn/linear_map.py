"""A linear function of a tensor whose gradient another function carries back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8booster.nn.autograd import once_differentiable

Map = Callable[[torch.Tensor], torch.Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.carry_back = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return ctx.carry_back(gradient), None, None


def linear_map(tensor: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """`forward(tensor)`, differentiable.

    Args:
        tensor: of any shape.
        forward: linear; gives another tensor object, of any shape.
        backward: its transpose: of the gradient of what `forward` gives, that of the tensor. Neither may hold tensors
            that need gradients.
    """
    return _LinearMap.apply(tensor, forward, backward)

"""Helpers of autograd functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward as torch's `once_differentiable`, without its work where nobody asks for gradients of gradients.

    Who asks for them gets an error also where the gradient that arrives is a constant, for which torch's passes what
    it gives off as one: it depends on what was saved.

    Args:
        backward: of a `torch.autograd.Function`.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        if not torch.compiler.is_compiling():
            gradients = tuple(each if each is None else each.detach().requires_grad_() for each in gradients)
        return checked(ctx, *gradients)

    return wrapper


Map = Callable[[Tensor], Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: Map, backward: Map) -> Tensor:
        ctx.carry_back = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        return ctx.carry_back(gradient), None, None


def linear_map(tensor: Tensor, forward: Map, backward: Map) -> Tensor:
    """Return `forward(tensor)`, differentiable.

    Args:
        tensor: of any shape.
        forward: linear; gives another tensor object, of any shape.
        backward: its transpose: of the gradient of what `forward` gives, that of the tensor. Neither may hold tensors
            that need gradients.
    """
    return _LinearMap.apply(tensor, forward, backward)

"""What the backwards of our autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's `once_differentiable`, whose work is left out where nobody asks for gradients of gradients.

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

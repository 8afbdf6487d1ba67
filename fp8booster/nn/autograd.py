"""What the backwards of our autograd functions have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import function


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Torch's `once_differentiable`, whose work is left out where nobody asks for gradients of gradients.

    Args:
        backward: of a `torch.autograd.Function`.
    """
    checked = function.once_differentiable(backward)

    @functools.wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        return (checked if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return wrapper

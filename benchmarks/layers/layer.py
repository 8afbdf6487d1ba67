"""Define a linear layer under measurement, and one step of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fp8booster.kernels.scales import amax_of


@dataclass(frozen=True)
class Inputs:
    """One input set of a layer from K to N features."""

    x: torch.Tensor
    """[M, K] BF16."""

    dy: torch.Tensor
    """[M, N] BF16, the gradient that reaches the layer."""

    x_amax: torch.Tensor
    """What a producer that knows the amax of x would deliver: float32, shape []."""

    dy_amax: torch.Tensor
    """The same for dy."""

    @classmethod
    def random(cls, m: int, k: int, n: int, device: torch.device) -> Inputs:
        """Normally distributed."""
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        dy = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        return cls(x, dy, amax_of(x), amax_of(dy))


Forward = Callable[[torch.Tensor, Inputs], torch.Tensor]
"""(x, the input set that it is of) to y."""


def available() -> str | None:
    """For a layer that needs nothing but fp8booster."""
    return None


@dataclass(frozen=True)
class Layer:
    """One way to compute a linear layer."""

    name: str
    """For tables."""

    build: Callable[[nn.Parameter], Forward]
    """Makes the forward from a weight, [N, K] BF16."""

    why_missing: Callable[[], str | None] = available
    """Why it cannot run here, or None."""

    is_peer: bool = False
    """A peer that fails is left out, with what it said; a layer of fp8booster that fails ends the benchmark."""

    x_amax_given: bool = False
    dy_amax_given: bool = False
    """What the floor of its casts need not read twice."""


def step(forward: Forward, weight: nn.Parameter, inputs: Inputs) -> None:
    """One forward and backward. x is a new tensor object each time, so that no layer can keep a cast of it."""
    weight.grad = None
    x = inputs.x.detach().requires_grad_()
    forward(x, inputs).backward(inputs.dy)

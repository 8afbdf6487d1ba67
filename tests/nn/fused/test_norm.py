"""Norms of heads as one, and norms with weights of each head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster.nn.fused.norm import HeadNorms

HEADS, SIZE = 3, 16


class Norms(nn.Module):
    """As StableLM holds them."""

    def __init__(self, heads: int = HEADS, **options: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE, **{"eps": 1e-3, "bias": False} | options) for _ in range(heads))
        for norm in self.norms:
            if norm.weight is not None:
                nn.init.normal_(norm.weight)

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return torch.cat([norm(each) for norm, each in zip(self.norms, heads.split(1, -2), strict=True)], -2)


def test_norms_of_heads_and_their_gradients_are_those_of_each() -> None:
    module, x = Norms(), torch.randn(2, 5, HEADS, SIZE, requires_grad=True)
    norms, leaves = HeadNorms.of(module), [x, *module.parameters()]
    found, right = norms(x), module(x)
    dy = torch.randn_like(right)
    torch.testing.assert_close(found, right)
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (found, right)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", range(HEADS))
def test_a_norm_that_someone_looks_at_is_called(place: int) -> None:
    module, x, seen = Norms(), torch.randn(2, 5, HEADS, SIZE), []
    norms = HeadNorms.of(module)
    module.norms[place].register_forward_hook(lambda _, args, output: seen.append(args[0].shape) or 2 * output)
    torch.testing.assert_close(norms(x), module(x))
    assert seen == [(2, 5, 1, SIZE)] * 2
    module.norms[place].forward = lambda each: 0 * each
    assert not norms(x)[..., place, :].any()


def with_other(change: Callable[[nn.ModuleList], Any]) -> nn.Module:
    module = Norms()
    change(module.norms)
    return module


UNLIKE: dict[str, Callable[[], nn.Module]] = {
    "none": lambda: Norms(0),
    "biases": lambda: Norms(bias=True),
    "no weights": lambda: Norms(elementwise_affine=False),
    "another epsilon": lambda: with_other(lambda norms: setattr(norms[1], "eps", 1e-5)),
    "another size": lambda: with_other(lambda norms: norms.append(nn.LayerNorm(8, 1e-3, bias=False))),
    "another class": lambda: with_other(lambda norms: norms.append(nn.RMSNorm(SIZE, 1e-3))),
    "more than norms": lambda: with_other(lambda norms: norms.append(nn.Linear(SIZE, SIZE))),
    "one bias": lambda: with_other(lambda norms: norms.append(nn.LayerNorm(SIZE, 1e-3))),
}


@pytest.mark.parametrize("why", UNLIKE)
def test_what_is_not_one_norm_of_all_heads_is_left_alone(why: str) -> None:
    assert HeadNorms.of(UNLIKE[why]()) is None

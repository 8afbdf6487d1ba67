"""Lazy sums are sums, whatever is done to them, and a norm makes the one that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster.nn.fused.decoder import fuse_blocks
from fp8booster.nn.fused.lazy import LazySum, made, parts_with_lazy_sums
from fp8booster.nn.fused.norm import FusedNorm
from fp8booster.nn.fused.pointwise import PLAIN
from tests.nn.fused.models import build
from tests.nn.fused.test_lazy_logits import OPERATORS

SHAPE = (2, 3, 4)


def lazy() -> tuple[LazySum, torch.Tensor]:
    """A sum, and what it is."""
    one, other = torch.randn(SHAPE), torch.randn(SHAPE)
    return LazySum(one, other), one + other


USES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "plus": (lambda x: x + torch.ones(SHAPE), True),
    "plus from the left": (lambda x: torch.ones(SHAPE) + x, True),
    "torch.add": (lambda x: torch.add(torch.ones(SHAPE), x), True),
    "added to itself": (lambda x: x + x, True),
    "torch.add with a factor": (lambda x: torch.add(x, torch.ones(SHAPE), alpha=3), False),
    "a sum that is broadcast": (lambda x: x + torch.ones(4), False),
    "a number": (lambda x: x + 2, False),
    "a number from the left": (lambda x: 2 + x, False),
    "multiplied": (lambda x: x * 3, False),
    "multiplied from the left": (lambda x: torch.full(SHAPE, 3.0) * x, False),
    "a function": (lambda x: torch.relu(x), False),
    "a method": (lambda x: x.transpose(1, 2), False),
}
"""And whether what comes of it is two terms still."""


@pytest.mark.parametrize("name", USES)
def test_what_is_done_to_a_lazy_sum_is_done_to_the_sum(name: str) -> None:
    use, is_lazy = USES[name]
    x, right = lazy()
    found = use(x)
    assert (isinstance(found, LazySum) and len(found.terms) == 2) == is_lazy
    torch.testing.assert_close(made(found), use(right))
    torch.testing.assert_close(x.made(), right)


def test_every_operator_is_that_of_the_sum() -> None:
    for use in OPERATORS:
        x, right = lazy()
        torch.testing.assert_close(made(use(x)), use(right))
    x, right = lazy()
    assert x.made() is x.made()
    assert len(x) == len(right)
    x[0] = 7.0
    right[0] = 7.0
    torch.testing.assert_close(made(x), right)


def test_what_is_lazy_in_containers_is_made() -> None:
    x, right = lazy()
    found = made((x, [x, 1], None))
    assert type(found) is tuple
    assert type(found[1]) is list
    torch.testing.assert_close([found[0], found[1][0]], [right, right])
    assert (found[1][1], found[2]) == (1, None)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_norm_leaves_the_sum_that_it_made_and_hooks_see_it_called_as_written(hooked: bool) -> None:
    model = build("llama", torch.float32)
    plain = build("llama", torch.float32).model.layers[0].input_layernorm
    fuse_blocks(model)
    layer, seen = model.model.layers[0], []
    if hooked:
        layer.input_layernorm.register_forward_hook(lambda module, args, output: seen.append(args))
    norm = parts_with_lazy_sums(layer, FusedNorm, saving=PLAIN)["input_layernorm"]
    one, other = torch.randn(2, 3, 64), torch.randn(2, 3, 64)
    x = LazySum(one, other)
    y = made(norm(x))
    assert len(x.terms) == 1
    torch.testing.assert_close(x.made(), one + other)
    torch.testing.assert_close(y, plain(one + other))
    assert [len(args) for args in seen] == [1] * hooked


def test_a_part_is_given_tensors_and_what_it_gives_may_be_added_to_later() -> None:
    class Part(nn.Module):
        def forward(self, x: torch.Tensor, *, other: torch.Tensor) -> tuple[torch.Tensor, str]:
            assert type(x) is type(other) is torch.Tensor
            return x * other, "more"

    layer = nn.Module()
    layer.part, layer.none = Part(), None
    parts = parts_with_lazy_sums(layer, FusedNorm, saving=PLAIN)
    assert parts.keys() == {"part"}
    x, right = lazy()
    first, more = parts["part"](x, other=LazySum(torch.full(SHAPE, 2.0)))
    assert type(first) is LazySum
    assert more == "more"
    torch.testing.assert_close(made(first), 2 * right)

"""Calls between the graphs of a layer: what they may give, and what they may find around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import capture_layers
from fp8booster.nn.graphs import captured_layers
from fp8booster.nn.graphs.breaks import COMPUTED_AGAIN, run_eagerly
from fp8booster.nn.graphs.layer import WARM_UP
from tests.nn.graphs.test_breaks import LAYERS, assert_equal, in_a_model, trained

pytestmark = pytest.mark.usefixtures("record")


class Layer(nn.Module):
    """Leaves to others what it does between its linear layers."""

    between: Callable[[Any, torch.Tensor], torch.Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inside, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(type(self).between(self, self.first(x))) + x


def number(x: torch.Tensor) -> torch.Tensor:
    return x.detach().argmax(-1, keepdim=True)


def of_whole_numbers(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * run_eagerly(number, x)


def of_whole_numbers_before_others(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return run_eagerly(self.inside, x * run_eagerly(number, x))


def of_whole_numbers_behind_others(self: Layer, x: torch.Tensor) -> torch.Tensor:
    x = run_eagerly(self.inside, x)
    return x * run_eagerly(number, x)


def expanded(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * run_eagerly(lambda given: self.inside(given).mean(-1, keepdim=True).expand_as(given), x)


def without_gradients(self: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = run_eagerly(self.inside, x)
    return x * found


def without_autocast(self: Layer, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        found = run_eagerly(self.inside, x.float())
    return x * found


def both(between: Callable[[Any, torch.Tensor], torch.Tensor], device: torch.device) -> tuple[nn.ModuleList, ...]:
    """Eager layers, and such that are captured."""
    torch.manual_seed(0)
    cls = type("Layer", (Layer,), {"between": between})
    eager = nn.ModuleList(cls() for _ in range(LAYERS)).to(device)
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    return eager, captured


@pytest.mark.parametrize(
    "between",
    [
        of_whole_numbers,
        of_whole_numbers_before_others,
        of_whole_numbers_behind_others,
        expanded,
        without_gradients,
        without_autocast,
    ],
)
def test_calls_compute_what_they_compute_in_eager_layers(
    between: Callable[[Any, torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    eager, captured = both(between, device)
    for step in range(WARM_UP + 2):
        with torch.autocast(device.type, torch.bfloat16, enabled=between is without_autocast):
            one, other = trained(eager, step), trained(captured, step)
        for mine, theirs in zip(one, other, strict=True):
            if mine is None:  # of what is not trained a graph gives zeros
                assert theirs is None or not theirs.any()
            else:
                assert torch.equal(mine, theirs)
    assert captured_layers(captured) == {None: LAYERS}


class Counts:
    """Counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: torch.Tensor) -> int:
        self.calls += 1
        return self.calls


def other_numbers(self: Layer, x: torch.Tensor) -> torch.Tensor:
    counts = vars(self).setdefault("counts", Counts())
    return x * run_eagerly(counts, x)


def other_sizes(self: Layer, x: torch.Tensor) -> torch.Tensor:
    counts = vars(self).setdefault("counts", Counts())
    return x + run_eagerly(lambda given: self.inside(given)[: 1 + counts(given) % 3], x).sum(0)


def changed_in_place(self: Layer, x: torch.Tensor) -> torch.Tensor:
    x = x.tanh() * 2
    found = run_eagerly(lambda given: self.inside(given.mul_(3.0)), x)
    return x * found


def hooked(self: Layer, x: torch.Tensor) -> torch.Tensor:
    def call(given: torch.Tensor) -> torch.Tensor:
        given.register_hook(lambda gradient: 2 * gradient)
        return self.inside(given)

    return x * run_eagerly(call, x)


def filled(self: Layer, x: torch.Tensor) -> torch.Tensor:
    losses: list[torch.Tensor] = []
    run_eagerly(lambda given, losses: losses.append(self.inside(given)), x, losses)
    return x + losses[0]


def elsewhere(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * run_eagerly(lambda given: torch.ones(given.shape[-1], device="meta"), x).numel()


def checkpointed(self: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + checkpoint(lambda given: run_eagerly(self.inside, given.sin()).cos(), x, use_reentrant=False)


CHANGES = "what must run eagerly in it changes or hooks what it is given, of which graphs know nothing"
FROM_CALL_TO_CALL = "what must run eagerly in it gives other sizes, types or constants from call to call"


@pytest.mark.parametrize(
    ("between", "why_not"),
    [
        (other_numbers, FROM_CALL_TO_CALL),
        (other_sizes, FROM_CALL_TO_CALL),
        (changed_in_place, CHANGES),
        (hooked, CHANGES),
        (filled, CHANGES),
        (checkpointed, COMPUTED_AGAIN),
        (elsewhere, "what must run eagerly in it gives a tensor of another device"),
    ],
)
def test_a_layer_stays_eager_whose_calls_no_graph_can_lie_around(
    between: Callable[[Any, torch.Tensor], torch.Tensor], why_not: str, device: torch.device
) -> None:
    eager, captured = both(between, device)
    for step in range(WARM_UP + 2):
        one, other = trained(eager, step), trained(captured, step)
        assert_equal(*zip(*((a, b) for a, b in zip(one, other, strict=True) if a is not None), strict=True))
    assert captured_layers(captured) == {why_not: LAYERS}


class Asked(nn.Module):
    """Asks for something that is not always there."""

    why_eager = "it asks its user"

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_there = nn.Linear(8, 8), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_there:
            raise KeyError("not there")
        return self.linear(x)


def asked(device: torch.device) -> nn.ModuleList:
    """Captured layers."""
    captured = both(lambda self, x: self.inside(x), device)[1]
    for layer in captured:
        layer.inside = Asked().to(device)
    return captured


def test_one_pair_of_graphs_serves_where_losses_and_errors_are_kept(device: torch.device) -> None:
    captured = asked(device)
    for name, parameter in captured[0].named_parameters():
        parameter.requires_grad_("inside" in name)  # nothing before the call
    kept: list[Any] = []
    for step in range(WARM_UP + 6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device)
        captured[0].inside.is_there = step % 2 == 0 or step <= WARM_UP
        try:
            loss = captured[1](captured[0](x)).sum()
            loss.backward()
            kept.append(loss)
        except KeyError as error:
            kept.append(error)
    assert captured_layers(captured) == {None: LAYERS}
    pairs = [kind.pairs for layer in captured for kind in layer.fp8_graphs._kinds.values()]
    assert list(map(len, pairs)) == [1] * LAYERS
    assert sum(isinstance(each, KeyError) for each in kept) == 2

"""Each hyperparameter of a parameter group holds for that group alone, whoever takes the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from fp8booster.optim import HybridAdam, one_pass

OWN: dict[str, Any] = {
    "lr": 0.3,
    "betas": (0.5, 0.7),
    "eps": 1e-2,
    "weight_decay": 0.4,
    "decoupled_weight_decay": False,
    "bias_correction": False,
    "amsgrad": True,
    "maximize": True,
}
"""Of one group, where the others have `USUAL`."""

USUAL = {"lr": 0.1, "weight_decay": 0.1}

BY_ITSELF = ("amsgrad", "maximize")
"""What the step in one pass refuses, with the reason."""

STEPS = 3


def of_torch(groups: list[dict[str, Any]]) -> Optimizer:
    return AdamW(groups, fused=True, **USUAL)


def hybrid(groups: list[dict[str, Any]]) -> Optimizer:
    return HybridAdam(groups, **USUAL)


def by_itself(optimizer: Optimizer) -> None:
    optimizer.step()


def in_one_pass(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        one_pass.step_group(optimizer, group, group["params"], [each.grad for each in group["params"]])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(40)) for _ in range(3)]


def train(groups: list[dict[str, Any]], make: Callable, step: Callable) -> list[nn.Parameter]:
    optimizer, trained = make(groups), [each for group in groups for each in group["params"]]
    for number in range(STEPS):
        for place, each in enumerate(trained):
            each.grad = torch.randn(40, generator=torch.Generator().manual_seed(10 * number + place)) / (1 + number)
        step(optimizer)
    return trained


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize(
    ("make", "step", "name"),
    [
        (make, step, name)
        for make, step in ((hybrid, by_itself), (hybrid, in_one_pass), (of_torch, in_one_pass))
        for name in OWN
        if name != "bias_correction" or make is hybrid  # torch has none
    ],
)
def test_a_groups_own_value_reaches_its_parameters_and_no_others(make, step, name, place) -> None:
    own = [{"params": [each]} | ({name: OWN[name]} if at == place else {}) for at, each in enumerate(parameters())]
    if step is in_one_pass and name in BY_ITSELF:
        assert one_pass.why_not(make(own)) == f"it was made with {name}=True"
        return
    found = train(own, make, step)
    usual = train([{"params": [each]} for each in parameters()], make, step)
    # one where all have the value: none needs another group to tell it
    alike = train([{"params": [each], name: OWN[name]} for each in parameters()], make, step)
    for at, each in enumerate(found):
        assert torch.equal(each, (alike if at == place else usual)[at]), at
        assert not torch.equal(usual[at], alike[at])


def _torchs(name: str | None, params: list[nn.Parameter]) -> Optimizer:
    """Torch's own optimizer with a value for all."""
    own = {} if name in (None, "decoupled_weight_decay") else {name: OWN[name]}
    kind = Adam if name == "decoupled_weight_decay" else AdamW
    return kind(params, fused=True, **USUAL | own)


@pytest.mark.parametrize("name", [name for name in OWN if name != "bias_correction"])
def test_a_groups_own_value_means_what_it_means_to_torch(name) -> None:
    first, second, third = parameters()
    found = train([{"params": [first, third]}, {"params": [second], name: OWN[name]}], hybrid, by_itself)
    first, second, third = parameters()
    expected = [*train([{"params": [first, third]}], lambda groups: _torchs(None, groups), by_itself)]
    train_second = _torchs(name, [second])
    for number in range(STEPS):  # the gradients of the third place
        second.grad = torch.randn(40, generator=torch.Generator().manual_seed(10 * number + 2)) / (1 + number)
        train_second.step()
    for one, other in zip([*expected, second], found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)

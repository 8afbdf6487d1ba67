"""The order in which gradients enter the buckets, whatever the order in which backward makes them."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.colossal.zero.gradient_order import _sets, keep_one_order
from fp8booster.nn.experts.grouped import GroupedExperts
from tests.nn.experts.test_fp8_experts import Experts


class Native(LowLevelZeroOptimizer):
    """What enters buckets, and when they are emptied."""

    grad_handles = ()

    def __init__(self) -> None:
        self.entered: list[tuple[str, int]] = []
        self.name_of: dict[int, str] = {}

    def _add_to_bucket(self, param: nn.Parameter, group_id: int) -> None:
        self.entered.append((self.name_of[id(param)], group_id))

    def _reduce_grad(self, partition_grad: bool) -> None:
        self.entered.append(("reduced", int(partition_grad)))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.entered.clear()

    def _sync_grad(self) -> None:
        self._add_to_bucket(self.layer.bias, 5)

    sync_dp_grads = _sync_grad


def optimizer_of(model: nn.Module) -> Native:
    optimizer = Native()
    optimizer.name_of = {id(each): name for name, each in model.named_parameters()}
    optimizer.layer = model[0]
    keep_one_order(optimizer, model)
    return optimizer


def layers() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32, bias=False))
    return convert_to_fp8(model, FP8Config(always=True, emulate=True))


def parts_of(model: nn.Module) -> list[list[list[nn.Parameter]]]:
    return [of_set.parts for of_set in _sets(model)]


GROUPS = {"0.weight": 0, "0.bias": 1, "1.weight": 2, "2.weight": 3}


@pytest.mark.parametrize("order", list(permutations(GROUPS)), ids=" ".join)
def test_a_layers_gradients_enter_together_in_their_order_and_with_their_groups(order: tuple[str, ...]) -> None:
    model = layers()
    optimizer, parameters = optimizer_of(model), dict(model.named_parameters())
    for name in order:
        optimizer._add_to_bucket(parameters[name], GROUPS[name])
    last = max(order.index("0.weight"), order.index("0.bias"))
    expected = []
    for place, name in enumerate(order):
        if place == last:
            expected += [("0.weight", 0), ("0.bias", 1)]
        elif not name.startswith("0."):
            expected.append((name, GROUPS[name]))
    assert optimizer.entered == expected


def test_what_is_held_back_enters_when_backward_has_ended_and_once() -> None:
    model = layers()
    optimizer = optimizer_of(model)
    optimizer._add_to_bucket(model[0].bias, 1)  # the weight gets none
    assert optimizer.entered == []
    optimizer._reduce_grad(True)
    assert optimizer.entered == [("0.bias", 1), ("reduced", 1)]
    optimizer._reduce_grad(False)
    assert optimizer.entered[2:] == [("reduced", 0)]


def test_what_a_backward_that_broke_off_held_back_is_forgotten() -> None:
    model = layers()
    optimizer = optimizer_of(model)
    optimizer._add_to_bucket(model[0].bias, 1)
    optimizer.zero_grad()
    optimizer._add_to_bucket(model[0].weight, 0)
    assert optimizer.entered == []


class Expert(nn.Module):
    """The layers of an expert, the first of which has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(32, 32, bias=not number) for number in range(3))


def block() -> nn.Sequential:
    """A layer, and three experts that may run as one."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList(Expert() for _ in range(3)))
    model = convert_to_fp8(model, FP8Config(always=True, emulate=True))
    model[1].fp8_grouped_experts = GroupedExperts(list(model[1]))
    return model


IN_ORDER = [
    f"1.{expert}.{name}"
    for expert in (2, 1, 0)
    for name in ("gate_proj.weight", "gate_proj.bias", "up_proj.weight", "down_proj.weight")
]


@pytest.mark.parametrize("seed", range(8))
def test_experts_enter_from_the_last_to_the_first_whatever_order_they_come_in(seed: int) -> None:
    model = block()
    optimizer, parameters = optimizer_of(model), dict(model.named_parameters())
    for _ in range(2):  # each backward begins anew
        optimizer.zero_grad()
        for name in random.Random(seed).sample(IN_ORDER, len(IN_ORDER)):
            optimizer._add_to_bucket(parameters[name], 7)
        assert optimizer.entered == [(name, 7) for name in IN_ORDER]


def test_experts_that_run_one_by_one_wait_for_none_of_the_others() -> None:
    model = block()
    optimizer, parameters = optimizer_of(model), dict(model.named_parameters())
    for number, name in enumerate(IN_ORDER, 1):
        optimizer._add_to_bucket(parameters[name], 7)
        assert len(optimizer.entered) == number // 4 * 4, name


def test_experts_of_which_one_gets_no_gradient_enter_in_order_when_backward_has_ended() -> None:
    model = block()
    optimizer, parameters = optimizer_of(model), dict(model.named_parameters())
    names = [name for name in IN_ORDER if "up_proj" not in name or "1.1" not in name]
    for _ in range(2):
        optimizer.zero_grad()
        for name in reversed(names):
            optimizer._add_to_bucket(parameters[name], 7)
        optimizer._reduce_grad(True)
        assert optimizer.entered == [*((name, 7) for name in names), ("reduced", 1)]


@pytest.mark.parametrize("name", ["_sync_grad", "sync_dp_grads"])
def test_what_is_taken_in_the_order_of_the_parameters_is_not_held_back(name: str) -> None:
    model = layers()
    optimizer = optimizer_of(model)
    getattr(optimizer, name)()
    assert optimizer.entered == [("0.bias", 5)]
    optimizer._add_to_bucket(model[0].bias, 1)  # is held back as ever
    assert optimizer.entered == [("0.bias", 5)]


class Layer(nn.Module):
    """A norm, two products, and a bias behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(32, bias=False), nn.Linear(32, 32, bias=False)
        self.down = nn.Linear(32, 32)


def test_a_layer_enters_in_one_order_run_without_a_graph_or_with_one() -> None:
    """One of the layers that graphs are made of gives its gradients from the last product, or all at once."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList(Layer() for _ in range(2)))
    model = convert_to_fp8(model, FP8Config(always=True, emulate=True))
    optimizer, parameters = optimizer_of(model), dict(model.named_parameters())
    of_layer = ("down.weight", "down.bias", "up.weight", "norm.weight")
    one_by_one = [f"1.{number}.{name}" for number in (1, 0) for name in of_layer]
    for number, name in enumerate(one_by_one, 1):
        optimizer._add_to_bucket(parameters[name], 3)
        # none waits but the weight for its bias
        assert len(optimizer.entered) == number - name.endswith("down.weight"), name
    in_order = list(optimizer.entered)
    assert in_order == [(name, 3) for name in one_by_one]
    for order in permutations(of_layer):
        optimizer.zero_grad()
        for number in (1, 0):
            for name in order:
                optimizer._add_to_bucket(parameters[f"1.{number}.{name}"], 3)
        assert optimizer.entered == in_order, order


def test_a_parameter_that_layers_share_enters_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ModuleList(Layer() for _ in range(2)))
    model[1][1].norm.weight = model[1][0].norm.weight
    model = convert_to_fp8(model, FP8Config(always=True, emulate=True))
    members = [each for of_set in _sets(model) for part in of_set.parts for each in part]
    assert len(members) == len({*members}) == 9  # two of the first layer


def test_sets_are_of_trained_parameters_that_no_other_set_has() -> None:
    model = layers()
    assert parts_of(model) == [[[model[0].weight, model[0].bias]]]
    model[0].bias.requires_grad_(False)
    assert _sets(model) == []
    experts = convert_to_fp8(nn.Sequential(Experts().bfloat16()), FP8Config(always=True, emulate=True))
    assert parts_of(experts) == [[list(experts[0].parameters())]]
    plain = nn.Sequential(nn.Linear(4, 4))
    optimizer = Native()
    keep_one_order(optimizer, plain)
    assert type(optimizer) is Native
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    convert_to_fp8(tied, FP8Config(always=True, emulate=True))
    assert [[list(map(id, part)) for part in parts] for parts in parts_of(tied)] == [
        [[id(tied[0].weight), id(tied[0].bias)]]
    ]

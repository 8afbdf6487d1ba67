"""A change of what a layer holds, wherever it holds it, is seen: no replay goes on with what was captured."""

from __future__ import annotations

import argparse
import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.held import Held
from fp8booster.nn.graphs.layer import MOST_MOVES, TOO_EARLY, WARM_UP
from fp8booster.nn.graphs.reached import MOST_HELD, Reached
from tests.nn.graphs.rerun import Rerun

pytestmark = pytest.mark.usefixtures("record")


class Swish(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x)


class Scaled:
    """A function that is an object."""

    factor = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Slots:
    __slots__ = ("__factor", "unset")

    def __init__(self, factor: float) -> None:
        self.set(factor)

    def set(self, factor: float) -> None:
        self.__factor = factor


class Layer(nn.Module):
    """Holds settings in many ways."""

    cap = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(32, 32), Swish()
        self.register_buffer("offset", torch.zeros(32))
        self.activation = F.relu
        self.config = SimpleNamespace(attention="sdpa", rope={"factors": [1.0, 2.0]}, text=argparse.Namespace(cap=30.0))
        self.merged: list[str] = []
        self.adapters = {"default"}
        self.nested = {"default": {"scale": 1.0}}
        self.ordered, self.queue = OrderedDict(a=1.0), deque([1.0])
        self.masks, self.table = [torch.ones(32)], torch.ones(32)
        self.scaled, self.method, self.slots = Scaled(), Scaled().method, Slots(1.0)
        self.limits = type("Limits", (), {"cap": 1.0})
        self.around = [nn.Module()]  # no child
        self.around[0].inside = nn.BatchNorm1d(2)
        self.wide, self.shift = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.zeros(32))

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            + self.helper(self.activation(self.gate(self.linear(x)))) @ self.wide * self.masks[0]
            + self.offset
            + self.shift
        )


def change_class_forward(layer: Layer) -> None:
    class Other(type(layer.gate)):
        pass

    layer.gate.__class__ = Other


CHANGES: dict[str, Callable[[Layer], object]] = {
    "a function": lambda layer: setattr(layer, "activation", F.gelu),
    "a method": lambda layer: setattr(layer, "helper", torch.tanh),
    "a configuration": lambda layer: setattr(layer.config, "attention", "eager"),
    "a list in a configuration": lambda layer: layer.config.rope["factors"].append(3.0),
    "a configuration in a configuration": lambda layer: setattr(layer.config.text, "cap", 50.0),
    "an attribute more in a configuration": lambda layer: setattr(layer.config, "window", 4),
    "an empty list": lambda layer: layer.merged.append("default"),
    "a set": lambda layer: layer.adapters.add("other"),
    "a dict in a dict": lambda layer: layer.nested["default"].update(scale=2.0),
    "a key": lambda layer: layer.nested.update(other=layer.nested.pop("default")),
    "an ordered dict": lambda layer: layer.ordered.update(a=2.0),
    "a deque": lambda layer: layer.queue.append(2.0),
    "a tensor in a list": lambda layer: layer.masks.__setitem__(0, torch.ones_like(layer.masks[0])),
    "the class of a module": change_class_forward,
    "an object that is called": lambda layer: setattr(layer.scaled, "factor", 2.0),
    "an object whose method is called": lambda layer: setattr(layer.method.__self__, "factor", 2.0),
    "a slot": lambda layer: layer.slots.set(2.0),
    "a slot that was empty": lambda layer: setattr(layer.slots, "unset", 2.0),
    "a class": lambda layer: setattr(layer.limits, "cap", 2.0),
    "a module that is no child": lambda layer: setattr(layer.around[0], "factor", 2.0),
    "a number of its child": lambda layer: setattr(layer.around[0].inside, "eps", 2.0),
    "a buffer of another module": lambda layer: layer.around[0].register_buffer("table", torch.ones(2)),
}


def layers(device: torch.device) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The same layers twice, of which the second are captured."""
    torch.manual_seed(0)
    eager = nn.ModuleList(Layer() for _ in range(2)).to(device)
    for layer in eager:
        layer.masks[0], layer.table = layer.masks[0].to(device), layer.table.to(device)
    captured = copy.deepcopy(eager)
    assert capture_layers(nn.ModuleDict({"layers": captured})) == 2
    return eager, captured


def step(model: nn.ModuleList) -> None:
    x = torch.ones(16, 32, device=model[0].wide.device)
    for layer in model:
        x = layer(x)
    x.sum().backward()


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_wherever_it_is_held_is_seen(device: torch.device, change: str) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    assert captured_layers(model) == {None: 2}
    CHANGES[change](model[0])
    step(model)
    assert captured_layers(model) == {None: 1, TOO_EARLY: 1}
    for _ in range(WARM_UP):
        step(model)
    assert captured_layers(model) == {None: 2}


def test_a_forward_put_into_a_class_is_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    monkeypatch.setattr(Swish, "forward", lambda self, x: x.tanh())
    step(model)
    assert captured_layers(model) == {TOO_EARLY: 2}


@pytest.mark.parametrize(("cls", "name"), [(Scaled, "factor"), (Layer, "cap")])
def test_a_number_put_into_a_class_is_seen(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, cls: type, name: str
) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    monkeypatch.setattr(cls, name, 2.0)
    step(model)
    assert captured_layers(model) == {TOO_EARLY: 2}


def test_a_layer_that_refers_to_the_model_and_itself_is_captured(device: torch.device) -> None:
    _, model = layers(device)
    for layer in model:
        layer.around += [model, layer, layer.linear]
    for _ in range(2 * WARM_UP + 2):
        step(model)
    assert captured_layers(model) == {None: 2}
    model[1].linear.weight = nn.Parameter(torch.zeros_like(model[1].linear.weight))
    step(model)
    assert captured_layers(model)[TOO_EARLY] >= 1
    assert model[1].fp8_graphs.why_not == TOO_EARLY


def test_equal_containers_are_the_same_setting(device: torch.device) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    model[0].nested, model[0].adapters, model[0].config.rope = (
        {"default": {"scale": 1.0}},
        {"default"},
        {"factors": [1.0, 2.0]},
    )
    step(model)
    assert captured_layers(model) == {None: 2}


def test_partial_functions_of_the_same_are_the_same_setting(device: torch.device) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        for layer in model:
            layer.activation = partial(F.leaky_relu, negative_slope=0.5)
        step(model)
    assert captured_layers(model) == {None: 2}
    model[0].activation = partial(F.leaky_relu, negative_slope=0.25)
    step(model)
    assert captured_layers(model) == {None: 1, TOO_EARLY: 1}


def test_what_changes_at_each_call_is_named(device: torch.device) -> None:
    _, model = layers(device)
    for number in range(WARM_UP + MOST_MOVES + 4):
        model[0].config.attention = f"number {number}"
        step(model)
    assert captured_layers(model) == {None: 1, "config.attention changes between calls": 1}
    for _ in range(WARM_UP + 1):
        step(model)
    assert captured_layers(model) == {None: 2}


@pytest.mark.parametrize(
    "move",
    [
        lambda layer: setattr(layer.offset, "data", torch.full_like(layer.offset, 2.0)),
        lambda layer: setattr(layer.masks[0], "data", torch.full_like(layer.masks[0], 2.0)),
        lambda layer: setattr(layer.wide, "data", layer.wide.data.t()),
    ],
    ids=["of a buffer", "of a tensor in a list", "transposed in place"],
)
def test_data_that_lie_elsewhere_or_otherwise_are_captured_again(
    device: torch.device, move: Callable[[Layer], object]
) -> None:
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    move(model[0])
    step(model)
    assert captured_layers(model) == {None: 1, "its weights have moved": 1}


def test_another_dtype_is_captured_anew(device: torch.device) -> None:
    """The memory of one type, freed on the way to another, may be given to that: its address tells nothing."""
    _, model = layers(device)
    for _ in range(WARM_UP + 2):
        step(model)
    shift = model[0].shift
    address, shift.grad = shift.data_ptr(), None
    shift.data = shift.data.view(torch.bfloat16)[:32]
    assert shift.data_ptr() == address
    step(model)
    assert captured_layers(model) == {None: 1, TOO_EARLY: 1}


class Writing(nn.Module):
    """A layer that leaves tensors in an attribute, as losses of routers are, or keeps a table that it makes anew."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.loss, self.losses = nn.Linear(32, 32), kind, None, []
        self.table = torch.zeros(0, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "an attribute":
            self.loss = y.square().mean()
        if self.kind == "a list":
            self.losses.append(y.square().mean())
        if self.kind == "a buffer":
            self.count = y.detach().sum()
        if len(self.table) < len(x):
            self.table = torch.arange(len(x), dtype=x.dtype, device=x.device)[:, None].cos()
        return y * self.table[: len(x)]


@pytest.mark.parametrize("kind", ["an attribute", "a list", "a buffer"])
def test_a_layer_that_leaves_tensors_in_attributes_runs_eagerly(device: torch.device, kind: str) -> None:
    model = nn.ModuleList(Writing(kind) for _ in range(2)).to(device)
    capture_layers(nn.ModuleDict({"layers": model}))
    weight = model[0].linear.weight
    for _ in range(WARM_UP + 2):
        weight.grad = None
        x = torch.randn(16, 32, device=device)
        for layer in model:
            x = layer(x)
        losses = [model[0].loss] if kind == "an attribute" else model[0].losses
        for loss in losses:
            loss.backward()
            assert weight.grad is not None
        model[0].losses.clear()
    (why,) = captured_layers(model)
    assert why == "its forward puts other tensors into attributes each time, which a replay would not"


def test_a_table_that_grows_is_captured_with_all_that_read_it(device: torch.device) -> None:
    model = nn.ModuleList(Writing("a table") for _ in range(2)).to(device)
    capture_layers(nn.ModuleDict({"layers": model}))
    for rows, calls, reason in [(16, WARM_UP + 2, None), (32, 1, TOO_EARLY), (16, WARM_UP, TOO_EARLY), (16, 1, None)]:
        for _ in range(calls):
            model[0](torch.randn(rows, 32, device=device)).sum().backward()
        assert captured_layers(model[0]) == {reason: 1}, rows


def test_replicas_that_share_the_graphs_of_a_layer_use_their_own_parameters(device: torch.device) -> None:
    """As those of `nn.DataParallel`, whose parameters are copies on other GPUs."""
    models = layers(device)
    for _ in range(WARM_UP + 2):
        for model in models:
            step(model)
    for call in range(WARM_UP + 2):
        found = []
        for model in models:
            replica = model[0]._replicate_for_data_parallel()
            for name in ("linear", "gate"):
                replica._modules[name] = model[0]._modules[name]._replicate_for_data_parallel()
            replica.wide, replica.shift = call * model[0].wide, call * model[0].shift
            for name, each in model[0].linear.named_parameters():
                setattr(replica._modules["linear"], name, call * each)
            found.append(replica(torch.ones(16, 32, device=device, requires_grad=True)))
            model.zero_grad()
            found[-1].sum().backward()
        assert torch.equal(*found)
        assert torch.equal(models[0][0].wide.grad, models[1][0].wide.grad)
    assert captured_layers(models[1])[None] == 1  # the other layer, which did not run


def test_a_number_on_the_host_that_changes_in_place_is_seen() -> None:
    layer, recorder = nn.Linear(4, 4, device="meta"), Rerun()
    layer.scale = torch.tensor(1.0)

    def record_on(device: torch.device) -> Rerun | None:
        return None if device.type == "cpu" else recorder

    before = Held(layer, record_on)
    assert before.is_as_found(layer)
    layer.scale.fill_(2.0)
    assert not before.is_as_found(layer)
    assert Held(layer, record_on).parts != before.parts


def test_long_containers_and_objects_of_libraries_are_not_looked_into() -> None:
    layer = nn.Linear(2, 2)
    layer.labels, layer.random = dict.fromkeys(range(MOST_HELD + 1)), random.Random(0)
    layer.cycle = [layer.random]
    layer.cycle.append(layer.cycle)
    assert Reached([layer], [layer]).holders == [vars(layer), layer.cycle]

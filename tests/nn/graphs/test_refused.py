"""Calls that no graph can be of, each with its reason: more happens in them than a replay does."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import WARM_UP

pytestmark = pytest.mark.usefixtures("record")


@dataclass
class Made:
    """What a layer gives."""

    hidden: torch.Tensor


class Layer(nn.Module):
    """Computes as it is told.

    Args:
        compute: takes the layer, what comes out of its product, and the further arguments of a call.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.compute, self.prompt = nn.Linear(32, 32), compute, None

    def forward(self, x: torch.Tensor, **options: Any) -> Any:
        return self.compute(self, self.linear(x), **options)


def model_of(compute: Callable[..., Any], device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    model = nn.ModuleList(Layer(compute) for _ in range(2)).to(device)
    capture_layers(nn.ModuleDict({"layers": model}))
    return model


def given(step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)


def reasons(model: nn.ModuleList, device: torch.device, **options: Any) -> list[str | None]:
    """Why the first layer, and the second after it, was not replayed in the last of some calls."""
    for step in range(WARM_UP + 1):
        x = given(step, device)
        for layer in model:
            x = layer(x, **options)
            x = x.hidden if isinstance(x, Made) else x
        x.sum().backward()
    return [layer.fp8_graphs.why_not for layer in model]


def twice(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return 2 * y


def write(layer: Layer, y: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    kept.copy_(y.detach())
    return y


CHANGES = "it changes what it is given, of which a replay has a copy"


@pytest.mark.parametrize("which", ["the tensor", "a view of it"])
def test_what_is_given_and_changed_in_place_is_changed_at_each_call(device: torch.device, which: str) -> None:
    model, kept = model_of(write, device), torch.zeros(2, 16, 32, device=device)
    of_call = torch.zeros(16, 32, device=device) if which == "the tensor" else kept[1]
    assert reasons(model, device, kept=of_call) == [CHANGES] * 2
    model[0](given(9, device), kept=of_call)
    assert torch.equal(of_call, model[0].linear(given(9, device)))


def append(layer: Layer, y: torch.Tensor, kept: list) -> torch.Tensor:
    kept.append(y.square().mean())
    return y


def put_in_place(layer: Layer, y: torch.Tensor, kept: list) -> torch.Tensor:
    kept[0]["loss"] = y.square().mean()
    return y


def take_out(layer: Layer, y: torch.Tensor, kept: list) -> torch.Tensor:
    return y + kept[0].pop("loss")


@pytest.mark.parametrize("change", [append, put_in_place, take_out])
def test_containers_that_are_given_and_changed_are_changed_at_each_call(
    device: torch.device, change: Callable[..., Any]
) -> None:
    model = model_of(change, device)
    for step in range(WARM_UP + 2):
        kept: list[Any] = [{"loss": torch.zeros((), device=device)}]
        before = kept[0]["loss"]
        model[0](given(step, device), kept=kept).sum().backward()
        assert len(kept) > 1 or kept[0].get("loss") is not before
    assert model[0].fp8_graphs.why_not == CHANGES


def test_a_gradient_s_hook_is_called_in_each_backward(device: torch.device) -> None:
    hooked: list[torch.Tensor] = []

    def hook(layer: Layer, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        factor.register_hook(hooked.append)
        return y * factor

    model = model_of(hook, device)
    for step in range(WARM_UP + 2):
        factor = torch.ones(32, device=device, requires_grad=True)
        model[0](given(step, device), factor=factor).sum().backward()
        assert len(hooked) == step + 1
    assert model[0].fp8_graphs.why_not == CHANGES


def by_prompt(layer: Layer, y: torch.Tensor) -> torch.Tensor:
    return y * layer.prompt[0]


@pytest.mark.parametrize(
    "prompt",
    [
        lambda trained: [trained],
        lambda trained: [trained.exp()],
        lambda trained: trained[None].detach().requires_grad_(),
    ],
    ids=["in a list", "computed outside", "an attribute"],
)
def test_a_tensor_that_is_trained_and_no_parameter_gets_its_gradient(
    device: torch.device, prompt: Callable[[torch.Tensor], Any]
) -> None:
    model = model_of(by_prompt, device)
    model[0].prompt, model[1].prompt = prompt(torch.ones(32, device=device, requires_grad=True)), torch.ones(1, 32)
    model[1].prompt = model[1].prompt.to(device)
    for step in range(WARM_UP + 2):
        model[1](model[0](given(step, device))).sum().backward(retain_graph=True)
    assert captured_layers(model) == {"it trains a tensor that is none of its parameters": 1, None: 1}
    leaf = model[0].prompt if isinstance(model[0].prompt, torch.Tensor) else model[0].prompt[0]
    assert leaf.grad_fn is not None or leaf.grad is not None


def test_outputs_that_a_graph_cannot_give_are_named_and_leave_other_layers_alone(device: torch.device) -> None:
    model = model_of(lambda layer, y: Made(y), device)
    model[1].compute = twice
    assert reasons(model, device) == ["it gives a Made", None]


class Marked(torch.Tensor):
    """A tensor with a meaning of its own."""


def by_factor(layer: Layer, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.sparse.mm(factor, y) if factor.is_sparse else y * (3.0 if type(factor) is Marked else 2.0)


@pytest.mark.parametrize(
    ("factor", "reason"),
    [
        (torch.ones(32).as_subclass(Marked), "it is given a Marked"),
        (torch.eye(16).to_sparse(), "it is given a tensor of torch.sparse_coo"),
        (torch.ones(32, device="meta"), "it is given tensors of several devices"),
    ],
    ids=["of a subclass", "sparse", "elsewhere"],
)
def test_tensors_that_another_cannot_stand_for_are_not_given_to_graphs(
    device: torch.device, factor: torch.Tensor, reason: str
) -> None:
    model = model_of(by_factor, device)
    if factor.device.type == "cpu":
        for _ in range(WARM_UP + 1):
            plain = model[0](given(0, device), factor=torch.ones(32, device=device))
            plain.sum().backward()
        factor = factor.to(device)
    assert reasons(model, device, factor=factor) == [reason] * 2


def test_a_conjugate_is_given_by_its_values(device: torch.device) -> None:
    model = model_of(lambda layer, y, turn: y * turn.real + turn.imag, device)
    for step in range(WARM_UP + 2):
        turn = torch.complex(given(step, device), given(step + 1, device))
        found = model[0](given(2, device), turn=turn.conj())
        found.sum().backward()
        y = model[0].linear(given(2, device))
        assert torch.equal(found, y * turn.real - turn.imag)
    assert model[0].fp8_graphs.why_not is None


@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand())],  # noqa: NPY002 (the generator that all share)
    ids=["of Python", "of NumPy"],
)
def test_random_numbers_of_the_host_are_drawn_at_each_call(device: torch.device, draw: Callable[[], float]) -> None:
    model = model_of(lambda layer, y: y * draw(), device)
    assert reasons(model, device) == ["it draws random numbers on the host, which a replay would not"] * 2


GENERATORS: dict[str, Callable[[], Any]] = {
    "of Python": lambda: random.Random(0),
    "of the system": random.SystemRandom,
    "of NumPy": lambda: np.random.default_rng(0),
    "of old NumPy": lambda: np.random.RandomState(0),
    "of torch": lambda: torch.Generator().manual_seed(0),
}


@pytest.mark.parametrize("which", GENERATORS)
@pytest.mark.parametrize("draws", [True, False])
def test_a_generator_of_a_layer_s_own_draws_at_each_call(device: torch.device, which: str, draws: bool) -> None:
    drawn: list[float] = []

    def add(layer: Layer, y: torch.Tensor) -> torch.Tensor:
        generator = layer.prompt["generator"]
        if len(drawn) == 2 or not draws:  # in two of the calls
            return y
        of_torch = isinstance(generator, torch.Generator)
        drawn.append(torch.rand((), generator=generator).item() if of_torch else generator.random())
        return y + drawn[-1]

    model = model_of(add, device)
    model[0].prompt = {"generator": GENERATORS[which]()}
    expected = "it draws random numbers on the host, which a replay would not"
    for step in range(WARM_UP + 1):
        model[0](given(step, device)).sum().backward()
    assert model[0].fp8_graphs.why_not == (expected if draws or which == "of the system" else None)


def test_random_numbers_that_another_thread_draws_now_and_then_are_nobody_s(device: torch.device) -> None:
    drawn: list[float] = []
    model = model_of(lambda layer, y: y if len(drawn) > 2 else drawn.append(random.random()) or y, device)
    assert reasons(model, device) == [None, None]


class Doubled(TorchFunctionMode):
    """Doubles what relu gives."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return 2 * made if function is F.relu else made


@contextmanager
def hook_of_all() -> Any:
    handle = register_module_forward_hook(lambda module, args, output: None)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("looking", "reason"),
    [
        (lambda: FlopCounterMode(display=False), "a TorchDispatchMode must see its operators"),
        (Doubled, "a TorchFunctionMode must see its functions"),
        (hook_of_all, "hooks of all modules must run"),
        (lambda: torch.device("cpu"), None),
        (nullcontext, None),
    ],
    ids=["operators", "functions", "modules", "a default device", "nobody"],
)
def test_who_looks_at_a_call_sees_it_whole(
    device: torch.device, looking: Callable[[], AbstractContextManager], reason: str | None
) -> None:
    model = model_of(lambda layer, y: F.relu(y), device)
    assert reasons(model, device) == [None, None]
    with looking():
        model[1](model[0](given(0, device))).sum().backward()
    assert captured_layers(model) == {reason: 2}
    assert reasons(model, device) == [None, None]


def test_a_layer_that_is_traced_or_transformed_runs_itself(device: torch.device) -> None:
    model = model_of(twice, device)
    assert reasons(model, device) == [None, None]
    traced = torch.jit.trace(model[0], given(0, device), check_trace=False)
    assert any(node.kind() == "aten::linear" for node in traced.inlined_graph.nodes())
    assert model[0].fp8_graphs.why_not == "torch.jit traces it"
    parameters = dict(model[0].named_parameters())

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model[0], parameters, (x,)).sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, given(0, device))
    assert each["linear.weight"].shape == (16, 32, 32)
    assert model[0].fp8_graphs.why_not == "torch.func transforms it"

"""Captured layers mean what eager ones do: frozen, checkpointed within more, changed in place, deleted, in threads."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import WARM_UP
from tests.nn.graphs.test_layer import forward, pair_of_models, tokens

pytestmark = pytest.mark.usefixtures("record")


class Block(nn.Module):
    """A layer with settings in containers, as peft has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)
        self.scales, self.window = {"a": 1.0}, (1.0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x)).tanh() * self.scales["a"] * self.window[0]


def blocks(device: torch.device) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The same layers twice, of which the second are captured."""
    torch.manual_seed(0)
    eager = nn.ModuleList(Block() for _ in range(2)).to(device)
    convert_to_fp8(eager, FP8Config(always=True))
    captured = copy.deepcopy(eager)
    assert capture_layers(nn.ModuleDict({"layers": captured})) == 2
    return eager, captured


def given(step: int, device: torch.device, trained: bool = False) -> torch.Tensor:
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device)
    return x.requires_grad_(trained)


def run(model: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = layer(x)
    return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def test_layers_that_are_frozen_run_eagerly(device: torch.device) -> None:
    models = blocks(device)
    for model in models:
        model[0].requires_grad_(False)
    for step in range(WARM_UP + 2):
        right, found = ((run(model, given(step, device)).sum().backward(), gradients(model))[1] for model in models)
        assert all(map(torch.equal, found, right))
    assert captured_layers(models[1]) == {"nothing in it or before it is trained": 1, None: 1}


def test_settings_that_change_within_containers_are_seen(device: torch.device) -> None:
    models = blocks(device)
    changes = {
        WARM_UP + 2: lambda layer: layer.scales.update(a=2.0),
        2 * WARM_UP + 4: lambda layer: setattr(layer, "window", (0.5,)),
        3 * WARM_UP + 6: lambda layer: setattr(layer, "scales", {"a": 3.0}),
    }
    for step in range(4 * WARM_UP + 8):
        for model in models:
            if step in changes:
                changes[step](model[0])
        right, found = (run(model, given(step, device)) for model in models)
        assert torch.equal(right, found), step
        found.sum().backward()
    assert captured_layers(models[1]) == {None: 2}


def of_model(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: run(model, x).sigmoid()


def of_layer(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is given a layer first, as its own forward is where transformers checkpoints within that."""
    return partial(lambda layer, x: run(model, x).sigmoid(), model[0])


@pytest.mark.parametrize("checkpointed", [of_model, of_layer])
def test_a_checkpoint_of_more_than_a_layer_runs_it_eagerly(device: torch.device, checkpointed: Callable) -> None:
    models = blocks(device)
    for step in range(WARM_UP + 2):
        right, found = (
            (checkpoint(checkpointed(model), given(step, device), use_reentrant=False).sum()) for model in models
        )
        right.backward()
        found.backward()
        assert all(map(torch.equal, *map(gradients, models))), step
    assert list(captured_layers(models[1])) == [
        "checkpointing is of more than the layer; checkpoint each layer by itself"
    ]


class Decoder(nn.Module):
    """A layer that reads a memory, which all layers read, several times, gives it on, and reads its own input too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.query(x) @ self.key(memory).t()
        return x + scores.softmax(-1) @ (self.value(memory) + memory * memory), memory


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_what_several_layers_read_add_up_one_by_one(device: torch.device, checkpointed: bool) -> None:
    torch.manual_seed(0)
    eager = nn.ModuleList(Decoder() for _ in range(3)).to(device, torch.bfloat16)
    captured = copy.deepcopy(eager)
    capture_layers(nn.ModuleDict({"layers": captured}))
    for step in range(WARM_UP + 3):
        found = []
        for model in (eager, captured):
            first, memory = (given(10 * step + number, device).bfloat16().requires_grad_() for number in range(2))
            x, read, states = first, memory * 2, []
            for layer in model:
                x, read = checkpoint(layer, x, read, use_reentrant=False) if checkpointed else layer(x, read)
                states.append(x)
            # as where a loss is of every layer
            (sum(state.square().mean() * state.mean() for state in states) + read.sum()).backward()
            found.append([x.detach(), first.grad, memory.grad, *gradients(model)])
        assert all(map(torch.equal, *found)), step
    assert captured_layers(captured) == {None: 3}


class Two(nn.Module):
    """A layer of two inputs, which it gives on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
        mixed = self.one(x) * self.other(other) + x * other
        return {"x": mixed * 2.0 if x is other else mixed, "given": x, "other": [other, mixed, mixed]}


def test_tensors_are_the_same_ones_where_eager_layers_have_the_same(device: torch.device) -> None:
    torch.manual_seed(0)
    eager = nn.ModuleList(Two() for _ in range(2)).to(device, torch.bfloat16)
    captured = copy.deepcopy(eager)
    capture_layers(nn.ModuleDict({"layers": captured}))
    for step in range(2 * WARM_UP + 4):
        found = []
        for model in (eager, captured):
            first, last = (given(10 * step + number, device).bfloat16().requires_grad_() for number in range(2))
            x, loss = first * 1, 0.0
            for layer in model:
                other = last * 1 if step % 2 else x
                made = layer(x, other)
                assert made["given"] is x
                assert made["other"][0] is other
                assert made["other"][1] is made["other"][2]
                # several reads each of what was given on, and of an output that is there twice
                for each in (made["given"], *made["other"]):
                    loss = loss + each.square().mean() * each.mean()
                x = made["x"]
            (loss + x.square().mean()).backward()
            found.append([x.detach(), first.grad, *([last.grad] if step % 2 else []), *gradients(model)])
        assert all(map(torch.equal, *found)), step
    assert captured_layers(captured) == {None: 2}


class Skipped(Block):
    """Gives on what it is given, as a layer that is switched off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_layer_that_computes_nothing_leaves_others_alone(device: torch.device) -> None:
    model = nn.ModuleList(Skipped() for _ in range(2)).to(device)
    other = nn.ModuleList(Block() for _ in range(2)).to(device)
    capture_layers(nn.ModuleDict({"layers": model, "others": other}))
    for step in range(WARM_UP + 2):
        run(other, run(model, given(step, device, True))).sum().backward()
    assert captured_layers(model) == {"nothing that it computes is trained": 2}
    assert captured_layers(other) == {None: 2}


def test_gradients_of_gradients_are_refused_as_by_eager_layers(device: torch.device) -> None:
    for model in blocks(device):
        for step in range(WARM_UP + 1):
            run(model, given(step, device, True)).sum().backward()
        x = given(0, device, True)
        y = run(model, x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            (gradient.square().sum() + y.square().sum()).backward()


def test_a_model_that_is_deleted_is_freed(device: torch.device) -> None:
    model = pair_of_models(device)[1]
    for step in range(WARM_UP + 2):
        forward(model, tokens(step, device)).backward()
    assert captured_layers(model) == {None: 2}
    layer = weakref.ref(model.model.layers[0])
    del model
    gc.collect()
    if device.type == "cuda":  # what stands in for a graph keeps its work
        assert layer() is None


def test_another_thread_runs_eagerly(device: torch.device) -> None:
    models = blocks(device)
    for step in range(WARM_UP + 1):
        run(models[1], given(step, device)).sum().backward()
    models[1].zero_grad()
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(run(models[1], given(9, device)).detach()))
    thread.start()
    thread.join()
    assert torch.equal(found[0], run(models[0], given(9, device)))
    assert list(captured_layers(models[1])) == ["another thread runs the model too"]
    run(models[1], given(9, device))
    assert captured_layers(models[1]) == {None: 2}


@pytest.mark.parametrize("in_place", [True, False])
def test_a_layer_with_a_compiled_part_runs_eagerly(device: torch.device, in_place: bool) -> None:
    models = blocks(device)
    for step in range(2 * WARM_UP + 4):
        if step == WARM_UP + 2:
            for model in models:
                if in_place:
                    model[0].linear.compile(backend="eager")
                else:
                    model[0].linear = torch.compile(model[0].linear, backend="eager")
        right, found = (run(model, given(step, device)).sum() for model in models)
        right.backward()
        found.backward()
        assert torch.equal(right, found), step
        for model in models:
            with torch.no_grad():
                for each in model.parameters():
                    each -= 1e-2 * each.grad
            model.zero_grad()
    why_not = "a module inside is compiled; compile the whole layer or nothing of it"
    assert captured_layers(models[1]) == {why_not: 1, None: 1}


def test_a_tensor_that_outlives_a_transform_of_torch_func_is_given_to_a_replay(device: torch.device) -> None:
    """It is a wrapper, and `Function.apply` takes it off, past which a replay goes."""
    models = blocks(device)
    for step in range(WARM_UP + 2):
        kept: list[torch.Tensor] = []

        def doubled(x: torch.Tensor, kept: list[torch.Tensor] = kept) -> torch.Tensor:
            kept.append(2 * x)
            return x.sum()

        torch.func.grad(doubled)(given(step, device))
        found = [(run(model, kept[0]).sum(), model) for model in models]
        assert torch.equal(found[0][0], found[1][0])
        right, others = ((made.backward(), gradients(model))[1] for made, model in found)
        assert all(map(torch.equal, others, right))
    assert captured_layers(models[1]) == {None: 2}

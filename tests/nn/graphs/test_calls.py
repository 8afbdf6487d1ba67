"""Captured layers of a few parts: what tells their calls apart, and what makes a capture of no use."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, forget_weights
from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import MOST_MOVES, MOST_PAIRS, WARM_UP
from fp8booster.nn.modules import ONLY_WAITS

LAYERS = 2


class Layer(nn.Module):
    """Gives two tensors, of which a model may use one alone, and where the first is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(32), nn.Linear(32, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32))

    def forward(
        self, x: torch.Tensor, factor: float = 1.0, shift: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.norm(x) * factor
        x = x if shift is None else x + shift
        with torch.autocast(x.device.type, enabled=False):
            one = self.one(x.float())
        return one, self.inner(x).float(), (one > 0).float()


def layers(device: torch.device, in_fp8: bool = False) -> tuple[nn.ModuleList, nn.ModuleList]:
    """The same layers twice, of which the second are captured."""
    torch.manual_seed(0)
    eager = nn.ModuleList(Layer() for _ in range(LAYERS)).to(device)
    if in_fp8:
        convert_to_fp8(eager, FP8Config(always=True))
    captured = copy.deepcopy(eager)
    assert capture_layers(nn.ModuleDict({"layers": captured})) == LAYERS
    return eager, captured


def run(model: nn.ModuleList, step: int, *, both: bool = True, of_input: bool = False, **options: Any) -> torch.Tensor:
    """A loss."""
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(next(model.parameters()).device)
    x.requires_grad_(of_input)
    for layer in model:
        one, other, mask = layer(x, **options)
        assert not mask.requires_grad
        x = (one + other if both else one) * (0.1 + mask)
    return x.float().square().sum()


def same_gradients(models: tuple[nn.ModuleList, nn.ModuleList], step: int, **options: Any) -> None:
    """Run both forward and backward, and compare."""
    gradients = []
    for model in models:
        model.zero_grad(set_to_none=False)
        run(model, step, **options).backward()
        gradients.append([torch.zeros(()) if each.grad is None else each.grad.clone() for each in model.parameters()])
    assert all(map(torch.equal, *gradients))


def replayed(models: tuple[nn.ModuleList, nn.ModuleList]) -> bool:
    return captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_an_output_that_is_not_used_has_no_gradient(device: torch.device) -> None:
    models = layers(device)
    for step in range(WARM_UP + 3):
        same_gradients(models, step, both=step % 2 == 0)
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_calls_of_other_numbers_and_dtypes_are_captured_apart(device: torch.device) -> None:
    models = layers(device)
    kinds: list[dict[str, Any]] = [
        {},
        {"factor": 2.0},
        {"factor": 0.5},
        {"shift": torch.full((16, 32), 0.25, device=device)},
        {"shift": torch.ones((16, 32), dtype=torch.int32, device=device)},
    ]
    for step in range(WARM_UP + 2):
        for options in kinds:
            same_gradients(models, step, **options)
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_a_weight_is_pinned_with_and_without_its_transpose(device: torch.device) -> None:
    models = layers(device, in_fp8=True)
    for model in models:
        model[0].norm.requires_grad_(False)
    for step in range(WARM_UP + 2):
        for of_input in (False, True):
            same_gradients(models, step, of_input=of_input)
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_a_copy_that_eager_code_made_meanwhile_is_made_again(device: torch.device) -> None:
    models = layers(device, in_fp8=True)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-4) for model in models]
    for step in range(WARM_UP + 3):
        if step > WARM_UP:
            same_gradients(models, step, factor=2.0)
        same_gradients(models, step)
        for optimizer in optimizers:
            optimizer.step()
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_backward_runs_outside_autocast(device: torch.device) -> None:
    models = layers(device)
    for step in range(WARM_UP + 2):
        gradients = []
        for model in models:
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = run(model, step)
            loss.backward()
            gradients.append([each.grad for each in model.parameters()])
        assert all(map(torch.equal, *gradients))
    assert replayed(models)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("name", ["norm", "one", "inner.0"])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_weights_that_lie_elsewhere_are_captured_again_a_few_times(
    device: torch.device, name: str, in_fp8: bool
) -> None:
    models = layers(device, in_fp8)
    for move in range(MOST_MOVES):
        for step in range(WARM_UP + 2):
            same_gradients(models, step)
        assert replayed(models)
        for model in models:
            weight = model[0].get_submodule(name).weight
            weight.data = weight.detach() * (1 + 0.5 * (move + 1))
            forget_weights(model)
    for step in range(WARM_UP + 2):
        same_gradients(models, step)
    assert captured_layers(models[1]) == {"its weights move": 1, None: LAYERS - 1}


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("name", ["norm", "one"])
def test_a_weight_changed_between_forward_and_backward_is_noticed(device: torch.device, name: str) -> None:
    models = layers(device, in_fp8=True)
    for step in range(WARM_UP + 1):
        same_gradients(models, step)
    loss = run(models[1], 0)
    with torch.no_grad():
        models[1][0].get_submodule(name).weight.mul_(2)
    with pytest.raises(RuntimeError, match="a weight needed for gradient computation has been modified"):
        loss.backward()


@pytest.mark.usefixtures("record")
def test_a_module_put_in_the_place_of_another_is_used(device: torch.device) -> None:
    models = layers(device)
    for step in range(WARM_UP + 2):
        same_gradients(models, step)
    other = nn.Linear(32, 32, device=device)
    for model in models:
        model[1].one = copy.deepcopy(other)
    for step in range(WARM_UP + 2):
        same_gradients(models, step)
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_only_so_many_forwards_wait(device: torch.device) -> None:
    models = layers(device)
    for step in range(2):
        gradients = []
        for model in models:
            model.zero_grad()
            losses = [run(model, step + micro) for micro in range(MOST_PAIRS + WARM_UP + 1)]
            for loss in losses:
                loss.backward()
            gradients.append([each.grad for each in model.parameters()])
        assert all(map(torch.equal, *gradients))
        assert list(captured_layers(models[1])) == [f"{MOST_PAIRS} forwards wait for their backward"]
    same_gradients(models, 0)
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_hooks_that_wait_for_weights_run_before_each_replay(device: torch.device) -> None:
    models = layers(device)
    arriving: dict[nn.Module, float] = {}

    def wait(module: nn.Linear, args: tuple) -> None:
        value = arriving.pop(module, None)
        if value is not None:
            with torch.no_grad():
                module.weight.fill_(value)

    setattr(wait, ONLY_WAITS, True)
    for model in models:
        model[0].inner[0].register_forward_pre_hook(wait)
    for step in range(WARM_UP + 3):
        arriving.update((model[0].inner[0], 0.01 * (step + 1)) for model in models)
        same_gradients(models, step)
        assert not arriving
    assert replayed(models)


@pytest.mark.usefixtures("record")
def test_a_gradient_of_an_input_outlives_the_next_replay(device: torch.device) -> None:
    models = layers(device)
    kept: list[list[torch.Tensor]] = [[], []]
    for step in range(WARM_UP + 3):
        for model, gradients in zip(models, kept, strict=True):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(step)).to(device).requires_grad_()
            model[0](x)[0].square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
    assert all(map(torch.equal, *kept))
    assert captured_layers(models[1])[None] == 1

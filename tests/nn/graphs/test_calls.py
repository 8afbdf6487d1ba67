"""Captured layers of a few parts: what tells their calls apart, and what makes a capture of no use."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8, forget_weights
from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import MOST_MOVES, MOST_PAIRS, TOO_EARLY, WARM_UP
from fp8booster.nn.modules import ONLY_WAITS
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from tests.nn.graphs.rerun import Rerun

LAYERS = 2


class Layer(nn.Module):
    """Gives two tensors, of which a model may use one alone, and where the first is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one = nn.LayerNorm(32), nn.Linear(32, 32)
        self.inner, self.activation = nn.Sequential(nn.Linear(32, 32)), nn.Identity()
        self.spare = nn.Parameter(torch.ones(2))  # which nothing reads

    def forward(
        self, x: torch.Tensor, factor: float = 1.0, shift: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.norm(x) * factor
        x = x if shift is None else x + shift
        with torch.autocast(x.device.type, enabled=False):
            one = self.activation(self.one(x.float()))
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


def gradients_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """As they are now; an empty tensor where there is none."""
    return [torch.zeros(0) if each.grad is None else each.grad.clone() for each in tensors]


def given(step: int, device: torch.device, rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(step)).to(device)


def run(
    model: nn.ModuleList, step: int, *, both: bool = True, x: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """A loss."""
    x = given(step, next(model.parameters()).device) if x is None else x
    for layer in model:
        one, other, mask = layer(x, **options)
        assert not mask.requires_grad
        x = (one + other if both else one) * (0.1 + mask)
    return x.float().square().sum()


def same_gradients(
    models: tuple[nn.ModuleList, nn.ModuleList],
    step: int,
    *,
    of_input: bool = False,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Run both forward and backward, and compare the gradients of parameters, and of the input where it has one."""
    gradients = []
    for model in models:
        model.zero_grad(set_to_none=False)
        x = given(step, next(model.parameters()).device).requires_grad_(of_input)
        with torch.autocast(x.device.type, autocast or torch.bfloat16, enabled=autocast is not None):
            loss = run(model, step, x=x, **options)
        loss.backward()
        gradients.append(gradients_of((x, *model.parameters())))
        assert (x.grad is not None) is of_input
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
        same_gradients(models, step, autocast=torch.bfloat16)
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
            if move and step <= WARM_UP:  # where it lies now may not be what stays
                assert captured_layers(models[1]) == {TOO_EARLY if step else "its weights have moved": 1, None: 1}
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
@pytest.mark.parametrize(("name", "other"), [("one", nn.Linear(32, 32)), ("activation", nn.Tanh())])
def test_a_module_put_in_the_place_of_another_is_used(device: torch.device, name: str, other: nn.Module) -> None:
    models = layers(device)
    for step in range(WARM_UP + 2):
        same_gradients(models, step)
    for model in models:
        setattr(model[1], name, copy.deepcopy(other).to(device))
    for step in range(WARM_UP + 2):
        same_gradients(models, step)
        if step < WARM_UP:
            assert captured_layers(models[1]) == {TOO_EARLY: 1, None: LAYERS - 1}
    assert replayed(models)


def test_only_so_many_forwards_wait(record: Rerun | None, device: torch.device) -> None:
    models = layers(device)
    for step in range(2):
        gradients = []
        for model in models:
            model.zero_grad()
            losses = [run(model, step + micro) for micro in range(MOST_PAIRS + WARM_UP + 1)]
            for loss in losses:
                loss.backward()
            gradients.append(gradients_of(model.parameters()))
        assert all(map(torch.equal, *gradients))
        assert list(captured_layers(models[1])) == [f"{MOST_PAIRS} forwards wait for their backward"]
        assert record is None or record.captured == LAYERS * MOST_PAIRS * 2
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


def test_outputs_outlive_the_next_replay_and_one_pair_of_graphs_serves_all(
    record: Rerun | None, device: torch.device
) -> None:
    models = layers(device)
    kept: list[list[torch.Tensor]] = [[], []]
    for step in range(WARM_UP + 4):
        for model, outputs in zip(models, kept, strict=True):
            made = model[0](given(step, device))
            made[0].square().sum().backward()
            outputs += made
    assert all(map(torch.equal, *kept))
    assert captured_layers(models[1])[None] == 1
    assert record is None or record.captured == 2  # a forward and its backward


def checkpointed(models: tuple[nn.ModuleList, nn.ModuleList], step: int) -> None:
    """Each layer."""
    wrapped = [[partial(checkpoint, layer, use_reentrant=False) for layer in model] for model in models]
    gradients = []
    for model, of_model in zip(models, wrapped, strict=True):
        model.zero_grad(set_to_none=False)
        run(of_model, step, x=given(step, next(model.parameters()).device)).backward()
        gradients.append(gradients_of(model.parameters()))
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize(
    ("one", "other", "captures"),
    [
        (same_gradients, partial(same_gradients, of_input=True), 3),  # what the second layer is given has one anyway
        (same_gradients, partial(same_gradients, autocast=torch.bfloat16), 4),
        (*(partial(same_gradients, autocast=dtype) for dtype in (torch.bfloat16, torch.float16)), 4),
        (same_gradients, checkpointed, 4),
    ],
    ids=["a gradient of the input", "autocast", "dtype of autocast", "checkpointing"],
)
@pytest.mark.parametrize("other_first", [False, True])
def test_the_same_call_of_which_only_this_differs_has_graphs_of_its_own(
    record: Rerun | None,
    device: torch.device,
    one: Callable[..., None],
    other: Callable[..., None],
    captures: int,
    other_first: bool,
) -> None:
    models = layers(device)
    for step in range(WARM_UP + 2):
        for call in (other, one) if other_first else (one, other):
            call(models, step)
    assert replayed(models)
    gc.collect()
    assert record is None or len(record.graphs) == captures * 2  # each a forward and its backward


class Noting(nn.Module):
    """A layer that notes how it is run, and reads what was noted on its weight."""

    def __init__(self, noted: list[tuple[bool, bool]]) -> None:
        super().__init__()
        self.linear, self.noted, self.draws = nn.Linear(32, 32), noted, 0
        self.outputs: list[weakref.ref[torch.Tensor]] = []
        self.linear.weight.factor = 3.0

    def forward(self, x: torch.Tensor | None = None, other: object = None) -> torch.Tensor:
        self.noted.append((torch.is_grad_enabled(), torch.is_autocast_cache_enabled()))
        if self.draws:
            self.draws -= 1
            torch.rand(1, device=self.linear.weight.device)
        x = torch.ones(4, 32, device=self.linear.weight.device) if x is None else x
        y = self.linear(x) * self.linear.weight.factor
        self.outputs.append(weakref.ref(y))
        return y


def noting(device: torch.device) -> tuple[Noting, list[tuple[bool, bool]]]:
    """A captured layer, and what it notes."""
    noted: list[tuple[bool, bool]] = []
    model = nn.ModuleDict({"layers": nn.ModuleList([Noting(noted), Noting([])])}).to(device)
    assert capture_layers(model) == 2
    return model["layers"][0], noted


def reason(layer: Noting, call: Callable[[], torch.Tensor], times: int = WARM_UP + 1) -> str | None:
    """Why the last of some calls was not replayed."""
    for _ in range(times):
        call().sum().backward()
    (found,) = captured_layers(layer)
    return found


def test_what_autocast_keeps_does_not_lie_in_the_memory_of_a_graph(record: Rerun | None, device: torch.device) -> None:
    layer, noted = noting(device)
    with torch.autocast(device.type, torch.bfloat16):
        assert reason(layer, lambda: layer(given(0, device))) is None
    eager, captured = noted[:WARM_UP], noted[WARM_UP:]
    assert eager == [(True, True)] * WARM_UP
    assert captured
    assert set(captured) == {(True, False)}


def test_a_checkpointed_forward_is_captured_without_gradients(record: Rerun | None, device: torch.device) -> None:
    layer, noted = noting(device)
    x = given(0, device)
    assert reason(layer, lambda: checkpoint(layer, x, use_reentrant=False), WARM_UP) == TOO_EARLY
    before = len(noted)
    assert reason(layer, lambda: checkpoint(layer, x, use_reentrant=False), 1) is None
    # the forward, what it is in backward, and where graphs are rerun each once more
    assert [of_forward for of_forward, _ in noted[before : before + 2]] == [False, True]
    gc.collect()
    assert not any(output() is not None for output in layer.outputs)  # what it saved for backward is free


@pytest.mark.parametrize("how", ["evaluation", "compiled code", "without gradients"])
def test_calls_of_other_modes_are_never_captured(
    record: Rerun | None, device: torch.device, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, noted = noting(device)
    if how == "evaluation":
        layer.eval()
    if how == "compiled code":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with torch.set_grad_enabled(how != "without gradients"):
        for _ in range(2 * WARM_UP):
            layer(given(0, device))
    assert len(noted) == 2 * WARM_UP
    assert record is None or not record.captured
    assert captured_layers(layer) == {TOO_EARLY: 1}


@pytest.mark.usefixtures("record")
def test_hooks_of_the_layer_itself_run_around_each_replay(device: torch.device) -> None:
    layer, _ = noting(device)
    seen: list[torch.Tensor] = []
    layer.register_forward_hook(lambda module, args, output: seen.append(output))
    assert reason(layer, lambda: layer(given(0, device)), WARM_UP + 2) is None
    assert len(seen) == WARM_UP + 2
    assert torch.equal(seen[0], seen[-1])


class PrefixCache:
    """Something that holds keys and values."""


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda layer, x: layer(x, PrefixCache()), "it is given a PrefixCache; set config.use_cache to False"),
        (lambda layer, x: layer(x, {1}), "it is given a set"),
        (lambda layer, x: layer(), "it is given no tensor"),
    ],
    ids=["cache", "set", "nothing"],
)
def test_what_a_graph_is_not_given_is_named(device: torch.device, call: Callable[..., torch.Tensor], why: str) -> None:
    layer, noted = noting(device)
    assert reason(layer, lambda: call(layer, given(0, device))) == why
    assert len(noted) == WARM_UP + 1


@pytest.mark.usefixtures("record")
def test_a_layer_that_holds_experts_itself_is_not_captured(device: torch.device) -> None:
    layer, _ = noting(device)
    layer.experts = nn.ModuleList([nn.Linear(2, 2)])
    x = given(0, device)
    assert reason(layer, lambda: layer(x)) == "the host must know how many tokens an expert gets"


@pytest.mark.usefixtures("record")
def test_a_layer_that_drew_once_is_not_checkpointed_in_a_graph(device: torch.device) -> None:
    layer, _ = noting(device)
    layer.draws = 2  # in the first call and its second forward alone
    x = given(0, device)
    found = reason(layer, lambda: checkpoint(layer, x, use_reentrant=False))
    assert found == "it draws random numbers, which checkpointing must draw again"


@pytest.mark.usefixtures("record")
def test_a_forward_without_gradients_is_not_taken_for_reentrant_checkpointing_later(device: torch.device) -> None:
    layer, _ = noting(device)
    x = given(0, device)
    with torch.no_grad():
        layer(x)
    assert reason(layer, lambda: checkpoint(layer, x, use_reentrant=False), 1) == TOO_EARLY


def test_a_weight_that_an_engine_fills_may_lie_elsewhere_in_16_bits(record: Rerun | None, device: torch.device) -> None:
    """As under ZeRO without 16-bit copies: the FP8 memory stays, the parameter's does not."""
    models = layers(device, in_fp8=True)
    config = models[0][0].one.fp8_config
    filled = [
        (layer.one, Casts(config).quantize_weight(layer.one.weight, transposed=True))
        for model in models
        for layer in model
    ]
    for linear, _ in filled:
        linear.fp8_weight = EngineWeight()
    for step in range(WARM_UP + 4):
        for number, (linear, held) in enumerate(filled):
            torch.manual_seed(10 * step + number % LAYERS)
            made = Casts(config).quantize_weight(torch.randn(32, 32).to(device), transposed=True)
            for place, values in zip(held[:3], made[:3], strict=True):
                place.copy_(values)
            linear.weight.data = torch.full((32, 32), torch.nan, device=device)
            linear.fp8_weight.fill([linear.weight], held)
        captured = record.captured if record is not None and step > WARM_UP else 0
        same_gradients(models, step)
        if captured:
            assert record.captured == captured
    assert replayed(models)

"""Layers with a part that must run eagerly: which of the others are captured, with the bits of eager ones."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, capture_layers, convert_to_fp8, fuse, report
from fp8booster.nn.experts.mixture import LOOKED_AT
from fp8booster.nn.fused import norm
from fp8booster.nn.graphs import captured_layers, captured_parts
from fp8booster.nn.graphs.layer import TOO_EARLY, WARM_UP
from fp8booster.nn.graphs.units import COUNTED, Unit, units_of
from tests.nn.fused.models import MAJOR, VOCABULARY, build

LAYERS = 2

pytestmark = pytest.mark.usefixtures("record")


class Told(nn.Module):
    """Tells why no graph can hold it."""

    why_eager: str | None = "it asks its user"

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        float(x.detach().sum())  # as who asks for numbers
        return self.inside(x)


class Layer(nn.Module):
    """Some parts, one of them eager, and one that holds another."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.block = nn.ModuleDict({"told": Told(), "shared": nn.Sequential(nn.Linear(8, 8), nn.Tanh())})
        self.activation = nn.Sequential(nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(self.norm(x))
        return x + self.activation(self.block["told"](x)) + self.block["shared"](x)


def layers(device: torch.device) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(LAYERS)).to(device)


def in_a_model(of: nn.ModuleList) -> nn.Module:
    return nn.ModuleDict({"layers": of})


def trained(of: nn.ModuleList, step: int) -> list[torch.Tensor]:
    """The output and all gradients of a step."""
    for parameter in of.parameters():
        parameter.grad = None
    device = next(of.parameters()).device
    dtype = next(of.parameters()).dtype
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).to(device, dtype).requires_grad_()
    x = given
    for layer in of:
        x = layer(x)
    x.float().square().sum().backward()
    return [x.detach(), given.grad, *(parameter.grad for parameter in of.parameters())]


def assert_equal(one: Iterable[torch.Tensor], other: Iterable[torch.Tensor]) -> None:
    assert all(torch.equal(*both) for both in zip(one, other, strict=True))


def test_units_are_the_parts_beside_what_must_run_eagerly() -> None:
    layer = Layer()
    units, reason = units_of(layer)
    assert reason == "it asks its user"
    assert units == [Unit(layer.first, "first"), Unit(layer.block["shared"], "shared")]
    layer.block["told"].why_eager = None
    assert units_of(layer) == ([Unit(layer)], None)


def test_experts_of_which_nobody_tells_run_eagerly() -> None:
    layer = Layer()
    layer.block = nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(8, 8)) for _ in range(2))})
    units, reason = units_of(layer)
    assert reason == COUNTED
    assert units == [Unit(layer.first, "first")]


def test_parts_are_replayed_with_the_bits_of_eager_ones(device: torch.device) -> None:
    eager = layers(device)
    captured = copy.deepcopy(eager)
    assert capture_layers(in_a_model(captured)) == LAYERS
    for step in range(WARM_UP + 3):
        assert_equal(trained(eager, step), trained(captured, step))
        for each in (eager, captured):
            each.eval()
        with torch.no_grad():
            assert_equal([eager[0](torch.ones(4, 8, device=device))], [captured[0](torch.ones(4, 8, device=device))])
        for each in (eager, captured):
            each.train()
        why_not = None if step >= WARM_UP else TOO_EARLY
        assert captured_parts(captured) == {("first", why_not): LAYERS, ("shared", why_not): LAYERS}
    assert captured_layers(captured) == {"it asks its user": LAYERS}


class Twice(nn.Module):
    """Reads its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * self.other(x)


def test_a_part_that_reads_twice_what_others_read_too_gives_two_gradients(device: torch.device) -> None:
    eager = layers(device)
    for layer in eager:
        layer.first, layer.block["shared"] = Twice().to(device), Twice().to(device)
    eager.bfloat16()
    captured = copy.deepcopy(eager)
    capture_layers(in_a_model(captured))
    for step in range(WARM_UP + 2):
        assert_equal(trained(eager, step), trained(captured, step))
    assert captured_parts(captured) == {("first", None): LAYERS, ("shared", None): LAYERS}


def test_copies_of_layers_in_parts_begin_anew(device: torch.device) -> None:
    captured = layers(device)
    model = in_a_model(captured)
    for _ in range(2):  # as `fuse` and the program each may
        assert capture_layers(model) == LAYERS
    for step in range(WARM_UP + 1):
        right = trained(captured, step)
    for again in (copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))):
        assert captured_parts(again) == {("first", TOO_EARLY): LAYERS, ("shared", TOO_EARLY): LAYERS}
        for _ in range(WARM_UP + 1):
            assert_equal(trained(again, WARM_UP), right)
        assert captured_parts(again) == {("first", None): LAYERS, ("shared", None): LAYERS}


def mixtures(device: torch.device, **options: object) -> tuple[nn.Module, nn.Module]:
    """A small mixture twice, in FP8 and fused, of which parts of the second are captured."""
    eager = build("mixtral", torch.bfloat16).to(device)
    convert_to_fp8(eager, FP8Config(always=True, cuda_graphs=False, **options))
    fuse(eager)
    captured = copy.deepcopy(eager)
    assert capture_layers(captured) == LAYERS
    return eager, captured


def loss(model: nn.Module, step: int) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(step))
    ids = ids.to(next(model.parameters()).device)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.skipif(MAJOR > 4, reason="experts are one parameter, and the whole layer is captured")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_attention_beside_experts_that_are_modules_is_captured(
    device: torch.device, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = mixtures(device)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    if checkpointed:
        for model in models:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    for step in range(WARM_UP + 3):
        found = [loss(model, step) for model in models]
        for each in found:
            each.backward()
        assert torch.equal(*found)
        assert_equal(*([each.grad for each in model.parameters()] for model in models))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    why_not = "checkpointing computes it again with the rest of its layer" if checkpointed else None
    assert captured_parts(models[1]) == {("self_attn", why_not): LAYERS}
    reason = f" not ({why_not})" if checkpointed else ""
    assert (
        f", {LAYERS} layers not ({LOOKED_AT}) replayed as CUDA graphs, "
        f"self_attn of {LAYERS} layers{reason} replayed as CUDA graphs"
    ) in report(models[1]).summary()
    # the norm behind a replayed attention adds its output to the residual stream
    adds: list[bool] = []
    row_norm = norm.row_norm

    def recorded(*args: Any, **how: Any) -> Any:
        adds.append(args[3] is not None)  # the residual
        return row_norm(*args, **how)

    monkeypatch.setattr(norm, "row_norm", recorded)
    loss(models[1], 0)
    assert adds == [*(LAYERS * [False, True]), False]

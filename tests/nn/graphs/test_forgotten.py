"""A model that becomes another one has none of the memory that its graphs kept, also where it trains no more."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, fuse, quantize
from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import TOO_EARLY, WARM_UP
from tests.nn.fused.models import batch, build
from tests.nn.graphs.rerun import Rerun

CONFIG = FP8Config(always=True, cuda_graphs=False)


def trained(device: torch.device, steps: int) -> nn.Module:
    """A model with captured layers after some steps."""
    model = convert_to_fp8(build().to(device), CONFIG)
    fuse(model)
    capture_layers(model)
    train(model, steps)
    assert captured_layers(model) == {None if steps > WARM_UP else TOO_EARLY: 2}
    return model


def train(model: nn.Module, steps: int) -> None:
    ids = batch().to(model.device)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad()


def collect() -> None:
    """What stands in for a graph holds the work, which holds it, and autograd holds a part of that."""
    for _ in range(3):
        gc.collect()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("steps", [1, WARM_UP + 2])
@pytest.mark.parametrize("part", ["", "model.layers.0", "model.layers.0.mlp"])
def test_weights_in_16_bits_are_freed_by_quantize(device: torch.device, steps: int, part: str) -> None:
    model = trained(device, steps)
    weight = weakref.ref(model.model.layers[0].mlp.down_proj._parameters["weight"])
    quantize(model.get_submodule(part))
    collect()
    assert weight() is None


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "another type": lambda model: model.float(),
    "another configuration": lambda model: convert_to_fp8(model, CONFIG),
    "another configuration of parts": lambda model: [convert_to_fp8(each.mlp, CONFIG) for each in model.model.layers],
    "fused again": fuse,
}


@pytest.mark.parametrize("change", CHANGES)
def test_graphs_are_freed_by_what_makes_another_model(record: Rerun | None, device: torch.device, change: str) -> None:
    if record is None:
        pytest.skip("counts what stands in for graphs")
    model = trained(device, WARM_UP + 2)
    gc.collect()
    assert record.graphs
    CHANGES[change](model)
    collect()
    assert not record.graphs
    train(model, WARM_UP + 1)
    assert captured_layers(model) == ({} if change == "fused again" else {None: 2})  # as its configuration says


def test_graphs_of_another_model_stay(record: Rerun | None, device: torch.device) -> None:
    model, other = trained(device, WARM_UP + 2), trained(device, WARM_UP + 2)
    convert_to_fp8(other, CONFIG)
    train(model, 1)
    assert captured_layers(model) == {None: 2}


@pytest.mark.usefixtures("record")
def test_a_backward_that_is_awaited_has_its_graphs(device: torch.device) -> None:
    model, ids = trained(device, WARM_UP + 2), batch().to(device)
    model(input_ids=ids, labels=ids).loss.backward()
    right = [each.grad for each in model.parameters()]
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    convert_to_fp8(model, CONFIG)
    loss.backward()
    assert all(map(torch.equal, right, (each.grad for each in model.parameters())))

"""Captured layers whose forwards and backwards run in any order: what one keeps is not written over by another."""

from __future__ import annotations

import random
import re
from itertools import count

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, fuse
from fp8booster.nn.graphs import capture_layers, captured_layers, recorder
from fp8booster.nn.graphs.layer import WARM_UP
from tests.nn.fused.models import build
from tests.nn.graphs.rerun import Rerun
from tests.nn.graphs.test_layer import LAYERS, forward, pair_of_models, tokens

Call = tuple[int, int]
"""The seed and the length of a batch."""


def gradients(model: nn.Module, forwards: list[Call], backwards: list[int], device: torch.device) -> list[torch.Tensor]:
    """Gradients of several forwards, whose backwards run in an order of their own."""
    losses = [forward(model, tokens(seed, device, length)) for seed, length in forwards]
    for place in backwards:
        losses[place].backward()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return [*(loss.detach() for loss in losses), *found]


ORDERS = {"last in, first out": [1, 0], "first in, first out": [0, 1]}


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("lengths", [(32, 32), (32, 48)], ids=["one length", "two lengths"])
@pytest.mark.parametrize("order", ORDERS)
def test_two_forwards_before_their_backwards(device: torch.device, order: str, lengths: tuple[int, int]) -> None:
    models = pair_of_models(device)
    for step in range(WARM_UP + 4):
        calls = [(2 * step, lengths[0]), (2 * step + 1, lengths[1])]
        right, found = (gradients(model, calls, ORDERS[order], device) for model in models)
        assert all(map(torch.equal, found, right)), step
    assert captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_any_order(device: torch.device) -> None:
    models, draw, seeds = pair_of_models(device), random.Random(0), count()
    for step in range(30):
        calls = [(next(seeds), draw.choice((16, 32, 48))) for _ in range(draw.randint(1, 4))]
        backwards = draw.sample(range(len(calls)), len(calls))
        right, found = (gradients(model, calls, backwards, device) for model in models)
        assert all(map(torch.equal, found, right)), (step, calls, backwards)


@pytest.mark.usefixtures("record")
def test_a_forward_that_gets_no_backward_is_in_nobodys_way(device: torch.device) -> None:
    models = pair_of_models(device)
    for step in range(WARM_UP + 4):
        if step > WARM_UP:
            forward(models[1], tokens(100 + step, device, 32))
        right, found = (gradients(model, [(step, 32)], [0], device) for model in models)
        assert all(map(torch.equal, found, right)), step
    assert captured_layers(models[1]) == {None: LAYERS}


@pytest.mark.usefixtures("record")
def test_an_autograd_graph_that_is_kept_goes_backward_again(device: torch.device) -> None:
    models = pair_of_models(device)
    for step in range(WARM_UP + 4):
        found = []
        for model in models:
            loss = model(input_ids=tokens(step, device)).logits.float().square().mean()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            forward(model, tokens(step + 100, device)).backward()
            loss.backward()
            found.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        assert all(map(torch.equal, *found)), step
    assert captured_layers(models[1]) == {None: LAYERS}


def test_a_gradient_that_is_held_outlives_other_steps(record: Rerun | None, device: torch.device) -> None:
    model = pair_of_models(device)[1]
    for step in range(WARM_UP + 2):
        forward(model, tokens(step, device)).backward()
        held = [parameter.grad for parameter in model.parameters()]
        values = [each.clone() for each in held]
        model.zero_grad()
        forward(model, tokens(step + 100, device)).backward()
        assert all(map(torch.equal, held, values))
        model.zero_grad()
    assert captured_layers(model) == {None: LAYERS}


@pytest.mark.gpu
def test_graphs_take_little_more_than_eager_layers(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the memory of a GPU")
    # as of 1 B: what lies in memory of its own takes 20 MiB at the least, which smaller weights do not fill
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
    sizes |= {"num_hidden_layers": 8, "max_position_embeddings": 2048}
    reserved = []
    for graphs in (False, True):
        model = build(**sizes).to(device)
        convert_to_fp8(model, FP8Config(always=True))
        fuse(model)
        if graphs:
            capture_layers(model)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for step in range(WARM_UP + 3):
            forward(model, tokens(step, device, 2048)).backward()
            model.zero_grad()
        reserved.append(torch.cuda.memory_reserved() - before)
    assert captured_layers(model) == {None: 8}
    # eager layers lay gradients where activations were, and graphs have places for them
    gradients = sum(each.nbytes for each in model.model.layers.parameters())
    assert reserved[1] <= 1.25 * reserved[0] + gradients, (reserved, gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_views_of_places_unless_somebody_holds_them(device: torch.device, micro_batches: int) -> None:
    if device.type != "cuda":
        pytest.skip("the CPU's products write to no place")
    models = pair_of_models(device)
    addresses = []
    for step in range(WARM_UP + 4):
        calls = [(10 * step + micro, 32) for micro in range(micro_batches)]
        for model in models:
            for seed, length in calls:
                forward(model, tokens(seed, device, length)).backward()
        right, found = ([parameter.grad for parameter in model.parameters()] for model in models)
        assert all(map(torch.equal, found, right)), step
        addresses.append(models[1].model.layers[0].mlp.down_proj.weight.grad.data_ptr())
        del right, found
        for model in models:
            model.zero_grad()
    assert captured_layers(models[1]) == {None: LAYERS}
    pairs = [pair for kind in models[1].model.layers[0].fp8_graphs._kinds.values() for pair in kind.pairs]
    assert [bool(pair._places) for pair in pairs] == [micro_batches == 1]
    if micro_batches == 1:
        assert len(set(addresses[WARM_UP:])) == 1


@pytest.mark.gpu
def test_graphs_without_room_leave_layers_eager(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type != "cuda":
        pytest.skip("the memory of a GPU")
    monkeypatch.setattr(recorder, "ROOM", 2**40)
    model = pair_of_models(device)[1]
    for step in range(WARM_UP + 2):
        forward(model, tokens(step, device)).backward()
    ((reason, count),) = captured_layers(model).items()
    assert count == LAYERS
    assert re.fullmatch(r"its graphs need [\d.]+ GiB, and eager layers leave 0\.00", reason)

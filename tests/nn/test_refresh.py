from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, forget_weights, refresh_weights
from fp8booster.kernels import many_cast
from fp8booster.nn.weights.casting import quantize_weight
from fp8booster.nn.weights.engine import EngineWeight
from tests.nn.reference import count_calls


def make_model(device: torch.device, **options: object) -> nn.Sequential:
    """Two layers of aligned sizes and, between them, one that is padded."""
    return nn.Sequential(
        FP8Linear(48, 32, device=device, **options),
        nn.GELU(),
        FP8Linear(32, 40, device=device, **options),
        FP8Linear(40, 64, device=device, **options),
        FP8Linear(64, 48, device=device, **options),
    )


@pytest.fixture
def model(device) -> nn.Sequential:
    return make_model(device)


@pytest.fixture
def x(device) -> torch.Tensor:
    return torch.randn(16, 48, device=device)


def weights_cast(casts: list, model: nn.Module) -> list[int]:
    """The layers whose weight was cast alone."""
    cast = {matrix.data_ptr() for matrix, _ in casts}
    return [
        index for index, layer in enumerate(model) if isinstance(layer, FP8Linear) and layer.weight.data_ptr() in cast
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_with_it_has_the_bits_of_training_without(dtype, device) -> None:
    torch.manual_seed(0)
    model = make_model(device, dtype=dtype)
    twin = copy.deepcopy(model)
    batches = torch.randn(4, 16, 48, device=device, dtype=dtype)
    for refreshed in (model, twin):
        optimizer = torch.optim.AdamW(refreshed.parameters(), lr=0.01)
        for batch in batches:
            if refreshed is model:
                assert refresh_weights(model) == 2
            refreshed(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_what_it_cannot_serve_is_cast_by_the_layers(model, x, casts) -> None:
    refresh_weights(model)
    model(x)
    assert weights_cast(casts, model) == [2, 3]


def test_the_next_step_makes_the_copies_stale(model, x, casts) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    refresh_weights(model)
    model(x).sum().backward()
    casts.clear()
    optimizer.step()
    model(x)
    assert weights_cast(casts, model) == [0, 2, 3, 4]
    casts.clear()
    refresh_weights(model)
    model(x)
    assert weights_cast(casts, model) == []  # and those it does not serve are still fresh


@torch.no_grad()
def change_in_place(layer: FP8Linear) -> None:
    layer.weight.mul_(2)


def change_and_forget(layer: FP8Linear) -> None:
    layer.weight.data.mul_(2)
    forget_weights(layer)


def replace(layer: FP8Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def swap_data(layer: FP8Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("change", [change_in_place, change_and_forget, replace, swap_data])
def test_a_changed_weight_is_seen(change, again, model, x) -> None:
    refresh_weights(model)
    model(x)
    change(model[0])
    if again:
        refresh_weights(model)
    expected = copy.deepcopy(model)(x)  # a copy holds no cast
    assert torch.equal(model(x), expected)


def test_copies_stay_where_they_are(model) -> None:
    def places() -> list[int]:
        copies = [model[index].fp8_weight.held for index in (0, 4)]
        return [tensor.data_ptr() for held in copies for tensor in held[:3]]

    refresh_weights(model)
    before = places()
    with torch.no_grad():
        model[0].weight.mul_(3)
    refresh_weights(model)
    assert places() == before


def test_a_backward_after_it_raises_rather_than_read_other_weights(model, x) -> None:
    refresh_weights(model)
    y = model(x.requires_grad_())
    refresh_weights(model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_layers_of_each_kind_are_cast_together_and_a_tied_weight_once(device, monkeypatch) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6))).to(device)
    model[1].weight = model[0].weight
    convert_to_fp8(model)
    model[4].fp8_config = FP8Config(power_of_two=True)
    FP8Linear.convert_in_place(model[5].bfloat16(), FP8Config())
    runs = count_calls(monkeypatch, many_cast.ManyCast, "run")
    assert refresh_weights(model) == 6
    assert sorted(len(casts.matrices) for (casts,) in runs) == [1, 1, 3]
    x = torch.randn(16, 32, device=device)
    for layer in model:
        input = x.to(layer.weight.dtype)
        assert torch.equal(layer(input), copy.deepcopy(layer)(input))


def test_layers_that_it_cannot_serve_are_left_alone(device) -> None:
    rowwise = FP8Linear(32, 32, device=device, config=FP8Config(granularity="rowwise"))
    normed = nn.utils.parametrizations.weight_norm(FP8Linear(32, 32, device=device))
    scattered = FP8Linear(32, 32, device=device)
    scattered.weight = nn.Parameter(torch.randn(32, 32, device=device).t())
    off = FP8Linear(32, 32, device=device)
    off.weight = nn.Parameter(torch.randn(1025, device=device)[1:].view(32, 32))
    lean = FP8Linear(32, 32, device=device, config=FP8Config(keep_weight_transposes=False))
    model = nn.ModuleList([rowwise, normed, scattered, off, lean, nn.Linear(32, 32, device=device)])
    assert refresh_weights(model) == 0
    kept = FP8Linear(32, 32, device=device)
    kept.fp8_weight = EngineWeight()
    kept.fp8_weight.fill([kept.weight], quantize_weight(kept.weight, FP8Config(), transposed=True))
    assert refresh_weights(kept) == 0
    assert kept.fp8_weight.is_provided([kept.weight])


def test_evaluation_makes_its_own_copies_and_training_gets_them_back(model, x, casts) -> None:
    refresh_weights(model)
    with torch.no_grad():
        expected = model.eval()(x)
    model.train()
    refresh_weights(model)
    casts.clear()
    assert torch.equal(model(x), expected)
    assert 0 not in weights_cast(casts, model)


def test_a_model_and_its_copies_die_together(device) -> None:
    layer = FP8Linear(32, 32, device=device)
    refresh_weights(layer)
    weight, held = weakref.ref(layer.weight), layer.fp8_weight.held
    transpose = weakref.ref(held.transpose)
    del layer, held
    gc.collect()
    assert weight() is None
    assert transpose() is None

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, forget_weights, fp8_linear
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.source import CachedWeight
from tests.nn.swapping import by_swapping


@pytest.fixture
def layer(device) -> FP8Linear:
    return FP8Linear(48, 32, bias=False, device=device)


@pytest.fixture
def x(device) -> torch.Tensor:
    return torch.randn(16, 48, device=device)


def weight_casts(casts: list, layer: nn.Linear) -> int:
    return sum(matrix.data_ptr() == layer.weight.data_ptr() for matrix, _ in casts)


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.AdamW])
def test_a_weight_is_cast_once_per_optimizer_step(optimizer_class, device, casts) -> None:
    model = nn.Sequential(FP8Linear(48, 32, device=device), FP8Linear(32, 48, device=device))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    optimizer.step()  # until the first, each backward counts as one
    for step in range(1, 4):
        for _ in range(3):
            model(torch.randn(16, 48, device=device)).sum().backward()
        assert [weight_casts(casts, layer) for layer in model] == [step, step]
        optimizer.step()
        optimizer.zero_grad()


def test_a_step_frees_the_copies(device) -> None:
    model = nn.Sequential(FP8Linear(48, 32, device=device), FP8Linear(32, 48, device=device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(16, 48, device=device)).sum().backward()
        assert all(layer.fp8_weight.held is not None for layer in model)
        optimizer.step()
        assert all(layer.fp8_weight.held is None for layer in model)


def test_gradients_accumulate_to_the_sum_of_the_micro_batches(layer, device) -> None:
    batches = [torch.randn(16, 48, device=device) for _ in range(3)]
    for batch in batches:
        layer(batch).sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    for batch in batches:
        fp8_linear(batch, weight).sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad)


def step_through_data(layer: nn.Linear) -> None:
    """As ZeRO does: the optimizer steps on another tensor, which is copied through `.data`."""
    master = nn.Parameter(layer.weight.detach().clone())
    master.grad = torch.ones_like(master)
    torch.optim.SGD([master], lr=0.5).step()
    layer.weight.data.copy_(master)


def change_through_data_and_forget(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)
    forget_weights(layer)


@torch.no_grad()
def change_in_place(layer: nn.Linear) -> None:
    layer.weight.mul_(2)


def load(layer: nn.Linear, **options: bool) -> None:
    layer.load_state_dict({"weight": torch.randn_like(layer.weight)}, **options)


def replace(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def swap_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


@pytest.mark.parametrize(
    "change",
    [
        step_through_data,
        change_through_data_and_forget,
        change_in_place,
        load,
        lambda layer: load(layer, assign=True),
        by_swapping(load),
        replace,
        swap_data,
        lambda layer: layer.bfloat16().float(),  # lies where it lay, rounded
    ],
    ids=[
        "step",
        "forget",
        "in place",
        "load",
        "load by assignment",
        "load by swapping",
        "replace",
        "swap data",
        "dtype and back",
    ],
)
def test_a_changed_weight_is_cast_anew(change, layer, x) -> None:
    before = layer(x)
    change(layer)
    y = layer(x)
    assert torch.equal(y, fp8_linear(x, layer.weight))
    assert not torch.equal(y, before)


def test_a_move_to_another_dtype_drops_the_copy_at_once(layer, x) -> None:
    layer(x)
    assert layer.fp8_weight.held is not None
    layer.bfloat16()
    assert layer.fp8_weight.held is None
    assert layer(x.bfloat16()).dtype is torch.bfloat16


@pytest.mark.gpu
def test_a_layer_can_move_between_devices() -> None:
    layer, x = FP8Linear(48, 32), torch.randn(16, 48)
    expected = layer(x)
    torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), expected, rtol=1e-2, atol=1e-3)
    assert torch.equal(layer.cpu()(x), expected)


def test_another_configuration_casts_anew(layer, x) -> None:
    layer(x)
    layer.fp8_casts = layer.fp8_casts.under(FP8Config(scaling="amax"))
    assert torch.equal(layer(x), fp8_linear(x, layer.weight, config=layer.fp8_config))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_evaluation_casts_a_weight_once_between_two_steps(mode, layer, x, casts) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(1, 3):
        trained = layer.train()(x)
        casts.clear()
        layer.eval()
        with mode():
            for _ in range(3):
                assert torch.equal(layer(x), trained)
        assert weight_casts(casts, layer) == 1, step
        trained.sum().backward()  # its weight is still there
        optimizer.step()


def test_what_inference_mode_cast_serves_a_forward_with_gradients(layer, x, casts) -> None:
    layer.eval()
    with torch.inference_mode():
        layer(x)
    y = layer(x)
    y.sum().backward()
    assert weight_casts(casts, layer) == 1
    weight = layer.weight.detach().clone().requires_grad_()
    fp8_linear(x, weight).sum().backward()
    assert torch.equal(layer.weight.grad, weight.grad)


def test_each_pass_of_evaluation_sees_what_was_written_unseen_before_it(layer, x) -> None:
    """As averages of weights are: swapped in for an evaluation, and out again."""
    layer(x)
    own = layer.weight.detach().clone()
    for swapped in (own * 2, own * 3):
        layer.weight.data.copy_(swapped)
        layer.eval()
        with torch.no_grad():
            assert torch.equal(layer(x), fp8_linear(x, swapped))
    layer.weight.data.copy_(own)
    assert torch.equal(layer.train()(x), fp8_linear(x, own))


@pytest.mark.parametrize("modes", [(False, True), (False, False, True)])
def test_merged_layers_see_what_was_written_before_the_mode_changed(modes, device) -> None:
    torch.manual_seed(0)
    module = nn.ModuleList(nn.Linear(32, size, bias=False) for size in (32, 16)).to(device)
    convert_to_fp8(module, FP8Config(always=True))
    merged, x = MergedLayers(list(module)), torch.randn(16, 32, device=device)
    before = merged(x)
    assert merged(x).equal(before)
    for layer in module:
        layer.weight.data.mul_(-2)
    for mode in modes:
        module.train(mode)
    assert torch.equal(merged(x), -2 * before)


def test_a_forward_without_gradients_makes_the_copy_that_training_reads(layer, x, casts) -> None:
    with torch.no_grad():
        layer(x)
    layer(x.requires_grad_()).sum().backward()
    assert weight_casts(casts, layer) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_copy_that_an_engine_keeps_is_used_without_gradients_too(mode, training, layer, x) -> None:
    expected = layer.train(training)(x)
    kept = Casts(layer.fp8_config).quantize_weight(layer.weight, transposed=True)
    layer.weight.data.fill_(torch.nan)  # as where no 16-bit weight is kept
    layer.fp8_weight = EngineWeight()
    layer.fp8_weight.fill([layer.weight], kept)
    with mode():
        assert torch.equal(layer(x), expected)
        assert torch.equal(layer(x * 1), expected)


def test_another_weight_at_the_same_address_is_cast_anew(device) -> None:
    memory = torch.ones(32, 48, device=device)

    def weight_there() -> torch.Tensor:
        return torch.empty(0, device=device).set_(memory.untyped_storage(), 0, memory.shape)

    cache = CachedWeight()
    first = weight_there()
    before = cache.forward([first], Casts(FP8Config()), transpose=True)
    memory.mul_(2)
    second = weight_there()
    assert (second.data_ptr(), second._version) == (first.data_ptr(), first._version)
    after = cache.forward([second], Casts(FP8Config()), transpose=True)
    assert torch.equal(after.inverse_scale, 2 * before.inverse_scale)


def test_a_deep_copy_starts_without_a_copy_of_the_weight(layer, x) -> None:
    layer(x)
    assert copy.deepcopy(layer).fp8_weight.held is None


def test_tied_weights_stay_tied(device) -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.GELU(), nn.Linear(32, 32, bias=False)).to(device)
    model[2].weight = model[0].weight
    convert_to_fp8(model)
    assert model[2].weight is model[0].weight
    x = torch.randn(16, 32, device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        y = model(x)
        hidden = nn.functional.gelu(fp8_linear(x, model[0].weight))
        assert torch.equal(y, fp8_linear(hidden, model[0].weight))
        y.sum().backward()
        optimizer.step()

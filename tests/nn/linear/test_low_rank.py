"""LoRA on a frozen FP8 layer as one function, against peft's own forward around the same layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.nn import FrozenFP8Linear
from fp8booster.nn.linear import low_rank
from fp8booster.nn.linear.low_rank import low_rank_of, low_rank_product

peft = pytest.importorskip("peft")

BF16 = torch.bfloat16


class Parts(nn.Module):
    """Layers of one input."""

    def __init__(self, *outputs: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, size, bias=bias) for size in outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def adapted(*outputs: int, bias: bool = False, device: torch.device, scaling="tensorwise", **lora: Any) -> Any:
    """Peft's model of `Parts`, frozen in FP8, in BF16, with adapters that are not zero."""
    torch.manual_seed(0)
    model = Parts(*outputs, bias=bias).to(device, BF16)
    for layer in model.layers:
        FrozenFP8Linear.convert_in_place(layer, FP8Config(emulate=device.type == "cpu", scaling=scaling))
    config = peft.LoraConfig(**{"r": 8, "lora_alpha": 4, "init_lora_weights": False, "target_modules": r".*\d"} | lora)
    adapted = peft.get_peft_model(model, config)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(BF16)
    return adapted


def outcome(model: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output, the input's gradient, and those of the adapters."""
    x = x.clone().requires_grad_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    y = model(x)
    return [y, *torch.autograd.grad(y, [x, *trained], dy)]


@pytest.fixture
def by_peft(monkeypatch):
    """Calls a function with peft's own forward."""

    def call(function, *args):
        with monkeypatch.context() as patch:
            patch.setattr(low_rank, "low_rank_of", lambda module: None)
            return function(*args)

    return call


def near(found: list[torch.Tensor], expected: list[torch.Tensor], bound: float = 0.03) -> bool:
    return all(
        (one.float() - other.float()).norm() < bound * other.float().norm()
        for one, other in zip(found, expected, strict=True)
    )


UNLIKE = {"rank_pattern": {r"layers.1": 4}, "alpha_pattern": {r"layers.1": 12, r"layers.2": 1}}
"""Ranks and factors of the second and the third layer's adapters."""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(32,), (3, 5)])
@pytest.mark.parametrize("outputs", [(96, 40), (40, 96)])
def test_it_computes_what_peft_does_around_the_layer(outputs, bias, rows, device, by_peft) -> None:
    model = adapted(*outputs, bias=bias, device=device, **UNLIKE)
    x, dy = (torch.randn(*rows, size, device=device, dtype=BF16) for size in (64, 136))
    found = outcome(model, x, dy)
    assert near(found, by_peft(outcome, model, x, dy))
    assert found[0].shape == (*rows, 136)


@pytest.mark.parametrize("lora", [{}, UNLIKE], ids=["alike", "unlike"])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_the_same_side_by_side(bias, lora, device) -> None:
    model = adapted(96, 32, 48, bias=bias, device=device, **lora)
    layers = list(model.base_model.model.layers)
    x, dy = (torch.randn(3, 11, size, device=device, dtype=BF16) for size in (64, 176))
    expected = outcome(model, x, dy)
    model.forward = lambda x: low_rank_product(x, layers)
    found = outcome(model, x, dy)
    # products of other sizes may add up in another order on a GPU
    assert torch.equal(found[0], expected[0]) or (device.type == "cuda" and near(found[:1], expected[:1], 0.004))
    # one cast of all gradients in place of one of each
    assert near(found[1:], expected[1:], 0.06)
    assert {rows for layer in layers for rows in layer.base_layer.in_fp8} == {33}


@pytest.mark.parametrize("place", range(3))
def test_layers_that_are_not_alike_are_called_one_by_one(place, device) -> None:
    """Whichever of them it is."""
    x = torch.randn(16, 64, device=device, dtype=BF16)
    sizes = [96, 32, 48]

    def layers_of(**options: Any) -> list[Any]:
        return list(adapted(*sizes, device=device, **options).base_model.model.layers)

    assert low_rank_product(x, layers_of(bias=True)) is not None
    for granularity in ("rowwise", "blockwise"):
        layers = layers_of(scaling=granularity)
        assert low_rank_product(x, layers) is None
        assert low_rank_product(x, layers[place : place + 1]) is None
    layers = layers_of(bias=True)
    layers[place].base_layer.bias.requires_grad_()
    assert low_rank_product(x, layers) is None
    assert low_rank_product(x, layers[place : place + 1]) is None
    layers = layers_of()
    layers[place].base_layer.fp8_casts = layers[place].base_layer.fp8_casts.under(
        FP8Config(emulate=device.type == "cpu", scaling="amax")
    )
    assert low_rank_product(x, layers) is None
    assert low_rank_product(x, layers[place : place + 1]) is not None
    layers = layers_of()
    layers[place].base_layer.scale_inputs_by(torch.tensor(3.0, device=device))
    assert low_rank_product(x, layers) is None
    assert low_rank_product(x, layers[place : place + 1]) is not None
    layers = layers_of()
    layers[place] = layers[place].base_layer
    assert low_rank_product(x, layers) is None
    sizes[place] = 40
    layers = layers_of()
    assert low_rank_product(x, layers) is None
    assert low_rank_product(x, layers[place : place + 1]).shape == (16, 40)


@pytest.mark.parametrize("amax", [0.5, 8.0])
def test_an_amax_that_was_given_scales_the_input(amax, device, by_peft) -> None:
    model = adapted(96, device=device)
    model.base_model.model.layers[0].base_layer.scale_inputs_by(torch.tensor(amax, device=device))
    x, dy = (torch.randn(32, size, device=device, dtype=BF16) for size in (64, 96))
    found, expected = outcome(model, x, dy), by_peft(outcome, model, x, dy)
    assert near(found[:2], expected[:2])
    assert near(found[3:], expected[3:])  # a's gradient is of the input as fprop read it, saturated


def test_backward_keeps_the_input_in_one_byte_a_value(device) -> None:
    model = adapted(96, device=device)
    x = torch.randn(48, 64, device=device, dtype=BF16, requires_grad=True)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        model(x)
    assert sum(each.nbytes for each in saved if each.numel() == 48 * 64) == 48 * 64
    assert all(each.numel() < 48 * 96 for each in saved)


def test_gradients_of_what_is_frozen_are_left_out(device) -> None:
    model = adapted(96, device=device)
    layer = model.base_model.model.layers[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.requires_grad_(False)
    model(torch.randn(16, 64, device=device, dtype=BF16)).float().sum().backward()
    assert a.grad is None
    assert b.grad.norm() > 0


@pytest.mark.parametrize("lora", [{"use_dora": True}, {"lora_dropout": 0.5}], ids=["DoRA", "dropout"])
def test_what_is_more_than_lora_is_left_to_peft(lora, device) -> None:
    model = adapted(96, device=device, **lora)
    assert low_rank_of(model.base_model.model.layers[0]) is None
    assert model(torch.randn(16, 64, device=device, dtype=BF16)).isfinite().all()


def test_what_peft_would_not_add_is_left_to_it(device) -> None:
    model = adapted(96, device=device)
    layer = model.base_model.model.layers[0]
    x = torch.randn(16, 64, device=device, dtype=BF16)
    assert low_rank_product(x, [layer]) is not None
    with model.disable_adapter():
        assert low_rank_of(layer) is None
        assert torch.equal(model(x), layer.base_layer(x))
    seen = []
    handle = layer.lora_A["default"].register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen
    handle.remove()
    handle = layer.register_forward_hook(lambda *_: None)
    assert low_rank_product(x, [layer, layer]) is None
    handle.remove()
    assert low_rank_product(x, [layer, layer]) is not None
    model.add_adapter("second", peft.LoraConfig(r=4, target_modules=r".*\d"))
    layer.set_adapter(["default", "second"])
    assert low_rank_of(layer) is None
    layer.set_adapter(["default"])
    assert low_rank_of(layer) is not None
    assert low_rank_product(x.float(), [layer]) is None
    assert low_rank_product(x[:0], [layer]) is None
    assert low_rank_of(nn.Linear(4, 4)) is None


def test_adapters_in_fp32_are_multiplied_in_16_bits_and_get_gradients_in_fp32(device) -> None:
    model = adapted(96, device=device)
    x, dy = (torch.randn(16, size, device=device, dtype=BF16) for size in (64, 96))
    expected = outcome(model, x, dy)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    found = outcome(model, x, dy)
    assert [each.dtype for each in found] == [BF16, BF16, torch.float32, torch.float32]
    assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(found, expected, strict=True))
    with torch.autocast(device.type, BF16):
        y = low_rank_product(x, list(model.base_model.model.layers))
    assert torch.equal(y, expected[0])


@pytest.mark.parametrize("outputs", [(96,), (96, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_under_autocast_any_input_is_multiplied_in_its_dtype(outputs, dtype, device) -> None:
    """As where the norms before it are in FP32, or the model in BF16 and autocast in FP16."""
    model = adapted(*outputs, device=device)
    layers, x = list(model.base_model.model.layers), torch.randn(16, 64, device=device, dtype=dtype)
    autocast_dtype = BF16 if dtype is torch.float32 else torch.float16
    x.requires_grad_()
    leaves = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]

    def gradients(make) -> list[torch.Tensor]:
        with torch.autocast(device.type, autocast_dtype):
            y = make()
        assert y.dtype is autocast_dtype
        return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y))]

    found = gradients(lambda: low_rank_product(x, layers))
    assert [each.dtype for each in found[1:]] == [leaf.dtype for leaf in leaves]
    assert near(found, gradients(lambda: torch.cat([layer(x) for layer in layers], -1)))


@pytest.mark.parametrize("always", [False, True])
def test_conversion_leaves_adapters_of_frozen_layers_alone(always, device) -> None:
    config = FP8Config(always=always, emulate=device.type == "cpu")
    model = adapted(96, device=device, r=16)
    factor = convert_to_fp8(model, config).base_model.model.layers[0].lora_A["default"]
    assert (type(factor) is FP8Linear) == always
    if not always:
        (notes,) = {row.notes for row in report(model).other}
        assert notes == "its product is made with that of the frozen FP8 layer that it adapts"

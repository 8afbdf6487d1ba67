"""Layers of one input as one product: what keeps them apart, and what the report says of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8booster import FP8Linear, report
from fp8booster.nn.fused.merged_layers import MergedLayers, MergedLinears
from fp8booster.nn.linear import speed_model

BF16 = torch.bfloat16


@pytest.mark.parametrize("with_bias", [0, 1])
@pytest.mark.parametrize(("kind", "merged"), [(FP8Linear, MergedLayers), (nn.Linear, MergedLinears)])
def test_layers_of_which_only_some_have_a_bias_run_one_by_one(kind, merged, with_bias) -> None:
    layers = [kind(64, 32, bias=number == with_bias, dtype=BF16) for number in range(2)]
    together = merged(layers)
    assert together(torch.randn(16, 64, dtype=BF16)) is None
    assert together.why_not_merged == "only some of the layers have a bias"


def test_each_layer_reports_the_numbers_of_tokens_of_the_one_product() -> None:
    layers = nn.ModuleList(FP8Linear(64, 32, dtype=BF16) for _ in range(2))
    MergedLayers(list(layers))(torch.randn(40, 64, dtype=BF16))
    assert [row.notes for row in report(layers).fp8] == ["padded: tokens 40->48"] * 2


KINDS = [(FP8Linear, MergedLayers), (nn.Linear, MergedLinears)]


@pytest.mark.parametrize(("kind", "merged"), KINDS)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_the_layers_side_by_side(kind, merged, bias) -> None:
    """Of other numbers of features each."""
    torch.manual_seed(0)
    layers = [kind(64, size, bias=bias, dtype=torch.float32) for size in (32, 48, 16)]
    together, x = merged(layers), torch.randn(2, 8, 64, requires_grad=True)
    leaves = [x, *(parameter for layer in layers for parameter in layer.parameters())]
    found, right = together(x), torch.cat([F.linear(x, each.weight, each.bias) for each in layers], -1)
    dy = torch.randn_like(right)
    gradients = [torch.autograd.grad(y, leaves, dy) for y in (found, right)]
    exact = kind is nn.Linear
    for one, other in zip([found, *gradients[0]], [right, *gradients[1]], strict=True):
        assert (one - other).norm() <= (1e-5 if exact else 0.1) * other.norm()
    assert together.why_not_merged is None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_layers_too_small_for_fp8_are_one_product_in_16_bits(bias: bool, autocast: bool, monkeypatch) -> None:
    """Each with its own gradients; the report tells for how many tokens."""
    monkeypatch.setattr(speed_model, "fp8_pays", lambda *_: False)
    torch.manual_seed(0)
    dtype = torch.float32 if autocast else BF16
    layers = nn.ModuleList(FP8Linear(64, size, bias=bias, dtype=dtype) for size in (32, 48, 16))
    together, x = MergedLayers(list(layers)), torch.randn(2, 8, 64, dtype=dtype, requires_grad=True)
    leaves = [x, *layers.parameters()]
    with torch.autocast("cpu", BF16, enabled=autocast):
        found, right = together(x), torch.cat([F.linear(x, each.weight, each.bias) for each in layers], -1)
    assert found.dtype is BF16
    torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)
    dy = torch.randn_like(right)
    for one, other in zip(*(torch.autograd.grad(y, leaves, dy) for y in (found, right)), strict=True):
        assert one.dtype is other.dtype is dtype
        assert (one - other).norm() <= 0.01 * other.norm()
    assert together.why_not_merged is None
    assert [layer.in_fp8 for layer in layers] == [{16: False}] * 3
    assert {row.name for row in report(layers).other} == {"0", "1", "2"}
    monkeypatch.setattr(speed_model, "fp8_pays", lambda *_: True)
    together(torch.randn(3, 16, 64, dtype=BF16).to(dtype))
    assert [layer.in_fp8 for layer in layers] == [{16: False, 48: True}] * 3


@pytest.mark.parametrize(("kind", "merged"), KINDS)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_calls_that_are_not_for_one_product_are_left_to_the_layers(kind, merged, place) -> None:
    layers = [kind(64, 32, dtype=BF16) for _ in range(3)]
    together, x = merged(layers), torch.randn(16, 64, dtype=BF16)
    assert together(x) is not None
    assert together(x[:0]) is None
    assert together(x.float()) is None
    with torch.autocast("cpu", BF16):
        assert together(x.float()).dtype is BF16
    layers[place].eval()
    assert together(x) is None
    layers[place].train()
    assert together(x) is not None
    handle = layers[place].register_forward_hook(lambda *_: None)
    assert together(x) is None
    assert "a layer has hooks or a forward of its own" in together.why_not_merged
    handle.remove()
    layers[place].forward = layers[place].forward
    assert together(x) is None
    del layers[place].forward
    assert together.stands_for(*layers)
    assert not together.stands_for(*layers[:place], kind(64, 32, dtype=BF16), *layers[place + 1 :])
    assert together.why_not_merged == "a layer was replaced"
    assert together(x) is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_weights_that_have_moved_are_multiplied_one_by_one(place) -> None:
    layers = [nn.Linear(64, 32, dtype=BF16) for _ in range(3)]
    together, x = MergedLinears(layers), torch.randn(16, 64, dtype=BF16)
    layers[place].weight.data = layers[place].weight.data.clone()
    assert together(x) is None
    assert "their weights have moved since" in together.why_not_merged


@pytest.mark.parametrize("frozen", [0, 1, 2])
@pytest.mark.parametrize(("kind", "merged"), KINDS)
def test_a_layer_that_is_frozen_gets_no_gradient_and_the_others_theirs(kind, merged, frozen) -> None:
    torch.manual_seed(0)
    layers = [kind(64, size, bias=False, dtype=BF16) for size in (32, 48, 16)]
    x = torch.randn(16, 64, dtype=BF16)
    merged(layers)(x).float().square().sum().backward()
    right = [layer.weight.grad for layer in layers]
    for layer in layers:
        layer.weight.grad = None
    layers[frozen].weight.requires_grad_(False)
    merged(layers)(x).float().square().sum().backward()
    for number, layer in enumerate(layers):
        assert (layer.weight.grad is None) == (number == frozen)
        assert number == frozen or torch.equal(layer.weight.grad, right[number])


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("changed", range(3))
def test_a_weight_that_changes_before_backward_is_refused_as_by_nn_linear(changed: int, trained: bool) -> None:
    layers = [nn.Linear(16, 16, bias=False).requires_grad_(trained) for _ in range(3)]
    x = torch.randn(4, 16, requires_grad=True)
    y = MergedLinears(layers)(x).sum()
    with torch.no_grad():
        layers[changed].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified .*in-?place"):
        torch.autograd.grad(y, x)


def test_a_weight_may_change_before_backward_where_that_does_not_read_it() -> None:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    together, x = MergedLinears(layers), torch.randn(4, 16)
    leaf = x.clone().requires_grad_()
    with torch.autocast("cpu", BF16):  # the product reads a copy
        copied = together(leaf)
        right = torch.cat([layer(leaf) for layer in layers], 1)
    dy = torch.randn_like(right)
    (right,) = torch.autograd.grad(right, leaf, dy)
    alone = together(x)
    with torch.no_grad():
        layers[2].weight.zero_()
    (found,) = torch.autograd.grad(copied, leaf, dy)
    assert (found - right).norm() <= 0.01 * right.norm()
    alone.backward(dy.float())
    torch.testing.assert_close(layers[2].weight.grad, dy.float()[:, 32:].t() @ x)

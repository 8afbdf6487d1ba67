"""A weight's gradient that is computed after backward: `linear_from_quantized(..., defer=...)`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, FP8Linear, formats
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.linear.functional import linear_from_quantized
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT

BF16 = torch.bfloat16
Computations = list[Callable[[], torch.Tensor]]


def linear(x, w, bias=None, config=None, defer=None) -> torch.Tensor:
    """The layer from casts with both layouts."""
    config = FP8Config() if config is None else config
    x8 = Casts(config).quantize(INPUT, x, transposed=True)
    return linear_from_quantized(
        x, w, bias, x8, Casts(config).quantize_weight(w, transposed=True), Casts(config), defer=defer
    )


def leaves(device: torch.device, rows: int = 40, inputs: int = 72, outputs: int = 56) -> list[torch.Tensor]:
    """Input, weight and bias, with sizes that are padded."""
    shapes = (rows, inputs), (outputs, inputs), (outputs,)
    return [torch.randn(shape, device=device, dtype=BF16, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(
    "config",
    [FP8Config(), FP8Config(scaling="rowwise"), FP8Config(scaling="blockwise"), FP8Config(emulate=True)],
    ids=["tensorwise", "rowwise", "blockwise", "emulated"],
)
def test_the_bits_are_those_of_the_immediate_gradient(config, device) -> None:
    tensors, later = leaves(device), Computations()
    dy = torch.randn(40, 56, device=device, dtype=BF16)
    expected = torch.autograd.grad(linear(*tensors, config), tensors, dy)
    linear(*tensors, config, later.append).backward(dy)
    x, w, bias = tensors
    assert w.grad is None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(bias.grad, expected[2])
    (compute,) = later
    with torch.no_grad():  # what it works on is its own
        for tensor in (*tensors, dy):
            tensor.zero_()
    dw = compute()
    assert dw.dtype is BF16
    assert dw.is_contiguous()
    assert torch.equal(dw, expected[1])


def test_only_the_fp8_transposes_are_kept(device) -> None:
    tensors, later = leaves(device, 64, 96, 32), Computations()
    y = linear(*tensors, defer=later.append)
    y.backward(torch.ones_like(y))
    *matrices, one_scale, other_scale = later[0].args
    assert one_scale.numel() == other_scale.numel() == 1
    assert not any(isinstance(argument, torch.Tensor) for argument in later[0].keywords.values())
    assert [(value.dtype, *value.shape) for value in matrices] == [(formats.E5M2, 32, 64), (formats.E4M3, 96, 64)]


def test_a_frozen_weight_defers_nothing(device) -> None:
    (x, w, bias), later = leaves(device), Computations()
    linear(x, w.requires_grad_(False), bias, defer=later.append).sum().backward()
    assert later == []
    assert x.grad is not None


@pytest.mark.parametrize("frozen", [None, 0, 1, 2])
def test_merged_layers_defer_what_they_train(frozen, device) -> None:
    """Each its rows of one product, which runs when the first are asked for."""
    layers = [FP8Linear(64, size, bias=False, device=device, dtype=BF16) for size in (32, 16, 48)]
    trained = [layer for number, layer in enumerate(layers) if number != frozen]
    if frozen is not None:
        layers[frozen].weight.requires_grad_(False)
    x = torch.randn(48, 64, device=device, dtype=BF16)
    MergedLayers(layers)(x).float().square().sum().backward()
    expected = [layer.weight.grad for layer in trained]
    later: dict[FP8Linear, Callable[[], torch.Tensor]] = {}
    for layer in layers:
        layer.weight.grad = None
        layer.fp8_defer = lambda layer=layer: lambda compute: later.setdefault(layer, compute)
    MergedLayers(layers)(x).float().square().sum().backward()
    assert list(later) == trained
    assert all(layer.weight.grad is None for layer in layers)
    assert all(map(torch.equal, [compute() for compute in later.values()], expected))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_defers_once_with_the_same_bits(use_reentrant, device) -> None:
    tensors, later = leaves(device), Computations()
    linear(*tensors, defer=later.append).sum().backward()
    checkpoint(lambda *t: linear(*t, defer=later.append), *tensors, use_reentrant=use_reentrant).sum().backward()
    plain, checkpointed = later
    assert torch.equal(plain(), checkpointed())

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear
from fp8booster.nn.fused.pointwise import activate, row_norm
from fp8booster.nn.weights.delivered import as_rows, deliver_amax, delivered_amax
from tests.nn.reference import exact_linear, signal_to_noise

CONFIG = FP8Config(emulate=True)
SIZE = 64

MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda x: row_norm(x, torch.ones(SIZE), 1e-6)[0],
    "SwiGLU": lambda x: activate(torch.cat((x, x), -1), gated=True),
}

CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "in place": lambda y: y.mul_(100),
    "one value": lambda y: y[3, 5].fill_(1000.0),
    "through a view": lambda y: y.view(-1)[::2].mul_(100),
    "other data": lambda y: setattr(y, "data", 100 * y.detach()),
    "through detach": lambda y: y.detach().mul_(100),
    "inplace module": nn.Hardtanh(-0.01, 0.01, inplace=True),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_an_activation_changed_in_place_before_its_layer_has_the_amax_that_it_has_then(maker, change) -> None:
    layer = FP8Linear(SIZE, 48, bias=False, config=CONFIG)
    y = MAKERS[maker](torch.randn(32, SIZE))
    assert delivered_amax(y) is not None
    CHANGES[change](y)
    assert delivered_amax(y) is None
    exact = exact_linear(y, layer.weight.detach(), torch.ones(32, 48)).output
    assert signal_to_noise(exact, layer(y)) > 20


def test_rows_have_the_amax_of_what_they_are_rows_of() -> None:
    y = MAKERS["norm"](torch.randn(2, 32, SIZE))
    assert delivered_amax(as_rows(y)) is delivered_amax(y)
    y.mul_(100)
    assert delivered_amax(as_rows(y)) is None


def test_a_gradient_to_which_autograd_adds_another_has_no_amax_left() -> None:
    """The norm's gradient, with its amax, meets another in the buffer of the layer before them."""
    for norm_last in (True, False):
        layer = FP8Linear(SIZE, SIZE, bias=False, config=CONFIG)
        x, seen = torch.randn(32, SIZE), []
        hidden = layer(x)
        hidden.register_hook(lambda gradient, seen=seen: seen.append(gradient.clone()))
        # autograd runs first what was computed last
        if norm_last:
            loss = 100 * hidden.square().sum()
            loss = loss + row_norm(hidden, torch.ones(SIZE), 1e-6)[0].sum()
        else:
            loss = row_norm(hidden, torch.ones(SIZE), 1e-6)[0].sum()
            loss = loss + 100 * hidden.square().sum()
        loss.backward()
        expected = exact_linear(x, layer.weight.detach(), seen[0]).weight
        assert signal_to_noise(expected, layer.weight.grad) > 20


@pytest.mark.parametrize("has_residual", [False, True])
def test_backward_from_the_sum_of_a_norm_alone_gives_the_sums_gradient(has_residual) -> None:
    x = torch.randn(32, SIZE, requires_grad=True)
    residual = torch.randn(32, SIZE, requires_grad=True) if has_residual else None
    weight = torch.ones(SIZE, requires_grad=True)
    factors = torch.randn(32, SIZE)
    _, h = row_norm(x, weight, 1e-6, residual)
    (h * factors).sum().backward()
    assert torch.equal(x.grad, factors)
    assert weight.grad is None
    if has_residual:
        assert torch.equal(residual.grad, factors)


def test_backward_from_the_sum_alone_reaches_the_layer_before_with_its_own_amax() -> None:
    layer = FP8Linear(SIZE, SIZE, bias=False, config=CONFIG)
    x, factors = torch.randn(32, SIZE), torch.randn(32, SIZE) * 100
    _, h = row_norm(layer(x), torch.ones(SIZE), 1e-6, torch.randn(32, SIZE))
    (h * factors).sum().backward()
    assert signal_to_noise(exact_linear(x, layer.weight.detach(), factors).weight, layer.weight.grad) > 20


def test_what_is_computed_from_a_tensor_has_no_amax_and_a_copy_of_it_has_none() -> None:
    x = deliver_amax(torch.randn(4), torch.ones(()))
    assert all(delivered_amax(each) is None for each in (x * 2, x.clone(), x.view(2, 2), x.detach()))

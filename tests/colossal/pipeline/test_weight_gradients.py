"""`defer_weight_gradient` in colossalai's store, in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)
from fp8booster import FP8Config
from fp8booster.nn.linear.functional import linear_from_quantized
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT

BF16 = torch.bfloat16
CONFIG = FP8Config()


@pytest.fixture
def store():
    """The store of colossalai, empty before and after."""
    from colossalai.pipeline.weight_grad_store import WeightGradStore

    yield WeightGradStore
    assert WeightGradStore.cache == []
    assert all(queue.empty() for queue in WeightGradStore.weight_grad_queue)


def forward(x: torch.Tensor, weight: nn.Parameter, held: object = None) -> torch.Tensor:
    """The output of an FP8 layer that defers, or of one that does not, without `held`."""
    from fp8booster.colossal.pipeline import defer_weight_gradient

    defer = None if held is None else defer_weight_gradient(held)
    x8 = Casts(CONFIG).quantize(INPUT, x, transposed=True)
    return linear_from_quantized(
        x, weight, None, x8, Casts(CONFIG).quantize_weight(weight, transposed=True), Casts(CONFIG), defer=defer
    )


@pytest.mark.parametrize("in_a_tuple", [False, True])
@pytest.mark.parametrize("order", ["BWBWBW", "BBWBWW", "BBBWWW"])
def test_micro_batches_add_up_as_autograd_adds_them(store, order, in_a_tuple) -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(64, 48, dtype=BF16))
    batches = [torch.randn(32, 48, dtype=BF16) * 10**-step for step in range(3)]
    for x in batches:
        forward(x, weight).square().sum().backward()
    expected, weight.grad = weight.grad, None
    held = (weight.view(weight.shape), weight) if in_a_tuple else weight
    coming, first = iter(batches), None
    for letter in order:
        if letter == "B":
            forward(next(coming), weight, held).square().sum().backward()
            store.flush(chunk=1)
        else:
            store.pop(chunk=1)
            first = weight.grad if first is None else first
    assert torch.equal(weight.grad, expected)
    assert weight.grad is first  # added in place


def test_a_w_pass_before_its_b_pass_is_an_error(store) -> None:
    with pytest.raises(RuntimeError, match="before its backward pass"):
        store.pop(chunk=0)

"""What every source of FP8 weights promises, for one weight, one that lies transposed, and several stacked."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.nn.weights.cached import CachedWeight
from fp8booster.nn.weights.casting import quantize_weight
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import WeightSource
from fp8booster.tensor import QuantizedMatrix

CONFIG = FP8Config()
CASES = {"one": (1, False), "transposed": (1, True), "stacked": (3, False)}


@pytest.fixture(params=CASES)
def case(request) -> tuple[list[nn.Parameter], bool]:
    """Weights, and whether they lie transposed."""
    count, is_transposed = CASES[request.param]
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(32, 48)) for _ in range(count)], is_transposed


def whole(weights: list[nn.Parameter], is_transposed: bool) -> QuantizedMatrix:
    matrix = torch.cat([weight.detach() for weight in weights])
    return quantize_weight(matrix.t() if is_transposed else matrix, CONFIG, transposed=True)


def provided(source: WeightSource, weights: list[nn.Parameter], is_transposed: bool) -> WeightSource:
    """The source, after an engine gave it its matrix."""
    if isinstance(source, EngineWeight):
        source.fill(weights, whole(weights, is_transposed))
    elif isinstance(source, ReshardedWeight):
        source.held = whole(weights, is_transposed)
    return source


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("by_engine", [False, True])
@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight, ReshardedWeight])
def test_forward_and_backward_read_the_cast_of_the_stacked_weights(kind, by_engine, case) -> None:
    weights, is_transposed = case
    source, expected = kind(is_transposed), whole(*case)
    if by_engine:
        provided(source, *case)
    found = source.forward(weights, CONFIG, transpose=True)
    backward_weight = source.backward(weights, CONFIG)
    assert (backward_weight is not None) == source.is_transient
    transpose, scale = (found.transpose, found.scale_of_transpose()) if backward_weight is None else backward_weight()
    assert_same(found.data, expected.data)
    assert_same(transpose, expected.transpose)
    assert torch.equal(found.inverse_scale, expected.inverse_scale)
    assert torch.equal(scale, expected.scale_of_transpose())


@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight])
def test_another_source_that_forgets_one_of_the_weights_makes_the_stack_stale(kind) -> None:
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(3)]
    stack, alone = provided(kind(), weights, False), CachedWeight()
    before = stack.forward(weights, CONFIG, transpose=True)
    assert stack.forward(weights, CONFIG, transpose=True) is before
    weights[1].data.mul_(2)
    assert stack.forward(weights, CONFIG, transpose=True) is before  # nobody saw it
    alone.invalidate([weights[1]])
    assert not stack.is_provided(weights)
    assert_same(stack.forward(weights, CONFIG, transpose=True).data, whole(weights, False).data)


def test_what_an_engine_made_serves_until_someone_else_changes_a_weight(case) -> None:
    weights, is_transposed = case
    source = EngineWeight(is_transposed)
    assert not source.is_provided(weights)
    provided(source, weights, is_transposed)
    assert source.is_provided(weights)
    assert source.forward(weights, CONFIG, transpose=True) is source.held
    with torch.no_grad():
        weights[-1].mul_(3)
    assert not source.is_provided(weights)
    assert_same(source.forward(weights, CONFIG, transpose=True).data, whole(*case).data)


def test_other_weights_in_the_place_of_a_stack_are_cast_anew() -> None:
    weights = [nn.Parameter(torch.randn(32, 48)) for _ in range(2)]
    source = CachedWeight()
    source.forward(weights, CONFIG, transpose=True)
    swapped = weights[::-1]
    assert_same(source.forward(swapped, CONFIG, transpose=True).data, whole(swapped, False).data)
    fewer = weights[:1]
    assert_same(source.forward(fewer, CONFIG, transpose=True).data, whole(fewer, False).data)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda source: pickle.loads(pickle.dumps(source))])
@pytest.mark.parametrize("kind", [CachedWeight, EngineWeight, ReshardedWeight])
def test_a_copy_holds_nothing_and_computes_the_same(kind, copied, case) -> None:
    weights, is_transposed = case
    source = provided(kind(is_transposed), *case)
    expected = source.forward(weights, CONFIG, transpose=True)
    other = copied(source)
    assert type(other) is (CachedWeight if kind is EngineWeight else kind)
    assert other.held is None
    assert_same(other.forward(weights, CONFIG, transpose=True).data, expected.data)


def test_forgetting_frees_what_is_held(case) -> None:
    weights, is_transposed = case
    for kind in (CachedWeight, EngineWeight, ReshardedWeight):
        source = provided(kind(is_transposed), *case)
        source.forward(weights, CONFIG, transpose=True)
        assert source.held is not None
        source.forget()
        assert source.held is None

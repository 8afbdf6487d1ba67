"""Casts of a layer's operands pass through `Casts`, whatever computes the layer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8
from fp8booster.config import Activations
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.fuse import fuse
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT
from tests.nn.experts.test_experts import called, experts, tokens
from tests.nn.experts.test_fp8_experts import HIDDEN, Experts
from tests.nn.fused.models import batch, build


def listed(casts: Casts) -> list[tuple[str, torch.Size]]:
    """List what is cast from now on: roles and shapes."""
    seen: list[tuple[str, torch.Size]] = []
    casts.observers.append(lambda role, tensor, made: seen.append((role, tensor.shape)))
    return seen


def test_a_layer_casts_its_operands_through_its_own_in_training_alone() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    seen = listed(layer.fp8_casts)
    x = torch.randn(2, 8, 32, requires_grad=True)
    torch.optim.SGD(model.parameters()).step()  # until the first, each backward counts as one
    for _ in range(2):
        model(x).sum().backward()
    each = [(INPUT, x.shape), (OUTPUT_GRADIENT, torch.Size((2, 8, 16)))]
    assert seen == [each[0], (WEIGHT, layer.weight.shape), each[1], *each]  # the weight is kept
    model.eval()(x)
    assert len(seen) == 5


def test_a_weight_that_is_gathered_twice_is_cast_twice() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    layer.fp8_weight, seen = ReshardedWeight(), listed(layer.fp8_casts)
    model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert [role for role, _ in seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT, WEIGHT]


@pytest.mark.parametrize("saved", ["16-bit", "8-bit"])
def test_fused_layers_cast_through_that_of_their_one_product(saved: str) -> None:
    config = FP8Config(vocabulary_head=True, activations=Activations(saved=saved))
    model = convert_to_fp8(build(), config)
    fuse(model)
    seen = {layer: listed(layer.fp8_casts) for layer in model.modules() if isinstance(layer, FP8Layer)}
    merged = list(merged_layers(model))
    of_merged = [listed(each.fp8_casts) for each in merged]
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    for each, found in zip(merged, of_merged, strict=True):
        assert [role for role, _ in found] == [INPUT, WEIGHT, OUTPUT_GRADIENT]
        assert found[1][1][0] == sum(map(len, each.weights))
        assert not any(seen[layer] for layer in each.layers)
    block = model.model.layers[0]
    assert [role for role, _ in seen[block.mlp.down_proj]] == [INPUT, WEIGHT, OUTPUT_GRADIENT]
    assert {role for role, _ in seen[model.lm_head]} == {INPUT, WEIGHT, OUTPUT_GRADIENT}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("self_attn.q_proj", {"scaling": "rowwise", "emulate": True}),  # layers of one input one by one
        ("mlp.down_proj", {"scaling": "delayed"}),
    ],
)
def test_what_backward_makes_again_is_cast_by_other_scales_than_its_amax(name: str, options: dict[str, Any]) -> None:
    model = build(hidden_size=128, intermediate_size=384)
    convert_to_fp8(model, FP8Config(activations=Activations(recompute="both"), always=True, **options))
    fuse(model)
    product = model.model.layers[0].get_submodule(name)
    seen = listed(product.fp8_casts)
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    assert [role for role, _ in seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT, INPUT]


def test_experts_cast_through_those_of_their_grouped_products() -> None:
    counts = [[16, 16, 16, 16]]
    grouped = GroupedExperts(experts())
    seen = [listed(casts) for casts in grouped.fp8_casts.values()]
    called(grouped, tokens(counts).requires_grad_(), counts).sum().backward()
    held = convert_to_fp8(nn.Sequential(Experts().bfloat16()), FP8Config(emulate=True, always=True))[0]
    assert isinstance(held, FP8Experts)
    seen += [listed(casts) for casts in held.fp8_casts.values()]
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    held(x, torch.arange(80).view(40, 2) % 4, torch.ones(40, 2, dtype=torch.bfloat16)).sum().backward()
    assert len(seen) == 4
    for found in seen:
        assert sorted(role for role, _ in found) == [INPUT, OUTPUT_GRADIENT, WEIGHT]


def test_a_copy_and_a_pickle_of_a_layer_have_casts_of_their_own() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    for other in (copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        assert type(other.fp8_casts) is Casts
        assert other.fp8_casts is not layer.fp8_casts


def first_layer(name: str, module: nn.Module) -> bool:
    return name == "0"


def test_a_model_is_pickled_without_a_choice_of_layers_that_cannot_be() -> None:
    config = FP8Config(emulate=True, layers=lambda name, module: name != "1")
    model = convert_to_fp8(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), config)
    other, x = pickle.loads(pickle.dumps(model)), torch.randn(16, 32)
    assert torch.equal(other(x), model(x))
    assert [type(layer) for layer in other] == [FP8Linear, nn.Linear, FP8Linear]
    assert other[0].fp8_config is other[2].fp8_config
    assert copy.deepcopy(model)[0].fp8_config is config
    with pytest.raises(ValueError, match=r"the model was pickled, .* give the configuration again"):
        convert_to_fp8(other, other[0].fp8_config)
    convert_to_fp8(other, config)
    convert_to_fp8(model, FP8Config(emulate=True, layers=first_layer))
    other = pickle.loads(pickle.dumps(model))
    assert other[0].fp8_config.layers is first_layer
    convert_to_fp8(other, other[0].fp8_config)

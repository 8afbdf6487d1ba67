"""Casts of a layer's operands pass through `Casts`, whatever computes the layer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.fused import fuse
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.casting import INPUT, OUTPUT_GRADIENT, WEIGHT, Casts
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix
from tests.nn.experts.test_experts import experts, tokens
from tests.nn.experts.test_held_as_one import HIDDEN, Experts
from tests.nn.fused.models import batch, build


class Listed(Casts):
    """Lists what it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.Size]] = []

    def quantize(self, role: str, *arguments: object, **how: object) -> QuantizedMatrix:
        """As `Casts.quantize`."""
        self.seen.append((role, arguments[1].shape))
        return super().quantize(role, *arguments, **how)


def test_a_layer_casts_its_operands_through_its_own_in_training_alone() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    seen = layer.fp8_casts = Listed()
    x = torch.randn(2, 8, 32, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    each = [(INPUT, x.shape), (OUTPUT_GRADIENT, torch.Size((2, 8, 16)))]
    assert seen.seen == [each[0], (WEIGHT, layer.weight.shape), each[1], *each]  # the weight is kept
    model.eval()(x)
    assert len(seen.seen) == 5


def test_a_weight_that_is_gathered_twice_is_cast_twice() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    layer.fp8_weight, layer.fp8_casts = ReshardedWeight(), Listed()
    model(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert [role for role, _ in layer.fp8_casts.seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT, WEIGHT]


@pytest.mark.parametrize("saved", ["16-bit", "8-bit"])
def test_fused_layers_cast_through_that_of_their_one_product(saved: str) -> None:
    config = FP8Config(vocabulary_head=True, saved_activations=saved)
    model = convert_to_fp8(build(), config)
    fuse(model)
    for layer in model.modules():
        if isinstance(layer, FP8Layer):
            layer.fp8_casts = Listed()
    merged = merged_layers(model)
    for each in merged:
        each.fp8_casts = Listed()
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    for each in merged:
        assert [role for role, _ in each.fp8_casts.seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT]
        assert each.fp8_casts.seen[1][1][0] == sum(map(len, each.weights))
        assert not any(layer.fp8_casts.seen for layer in each.layers)
    block = model.model.layers[0]
    assert [role for role, _ in block.mlp.down_proj.fp8_casts.seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT]
    assert {role for role, _ in model.lm_head.fp8_casts.seen} == {INPUT, WEIGHT, OUTPUT_GRADIENT}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("self_attn.q_proj", {"granularity": "rowwise", "emulate": True}),  # layers of one input one by one
        ("mlp.down_proj", {"scaling": "delayed"}),
    ],
)
def test_what_backward_makes_again_is_cast_by_other_scales_than_its_amax(name: str, options: dict[str, Any]) -> None:
    model = build(hidden_size=128, intermediate_size=384)
    convert_to_fp8(model, FP8Config(recompute="both", always=True, **options))
    fuse(model)
    product = model.model.layers[0].get_submodule(name)
    product.fp8_casts = Listed()
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    assert [role for role, _ in product.fp8_casts.seen] == [INPUT, WEIGHT, OUTPUT_GRADIENT, INPUT]


def test_experts_cast_through_those_of_their_grouped_products() -> None:
    counts = [[16, 16, 16, 16]]
    grouped = GroupedExperts(experts(), always=True)
    grouped.fp8_casts = {name: Listed() for name in grouped.fp8_casts}
    grouped(tokens(counts).requires_grad_(), counts).sum().backward()
    held = convert_to_fp8(nn.Sequential(Experts().bfloat16()), FP8Config(emulate=True, always=True))[0]
    assert isinstance(held, FP8Experts)
    held.fp8_casts = {name: Listed() for name in held.fp8_casts}
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    held(x, torch.arange(80).view(40, 2) % 4, torch.ones(40, 2, dtype=torch.bfloat16)).sum().backward()
    for casts in (*grouped.fp8_casts.values(), *held.fp8_casts.values()):
        assert sorted(role for role, _ in casts.seen) == [INPUT, OUTPUT_GRADIENT, WEIGHT]


def test_a_copy_and_a_pickle_of_a_layer_have_casts_of_their_own() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)))
    for other in (copy.deepcopy(model)[0], pickle.loads(pickle.dumps(model))[0]):
        assert type(other.fp8_casts) is Casts
        assert other.fp8_casts is not layer.fp8_casts

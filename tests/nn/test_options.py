"""Every field of FP8Config that products read reaches each of them, whatever computes them, and only those meant."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralBlockSparseTop2MLP
from transformers.pytorch_utils import Conv1D

from fp8booster import FP8Config, convert_to_fp8, formats
from fp8booster.config import FAST_PRODUCTS, Formats
from fp8booster.kernels.product import product
from fp8booster.nn.experts import grouped_linear
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.fused.loss import linear_cross_entropy
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import RealTime

BF16 = torch.bfloat16
FPROP, DGRAD, WGRAD = "fprop", "dgrad", "wgrad"
E4M3, E5M2 = formats.E4M3, formats.E5M2


def _input(rows: int = 48) -> torch.Tensor:
    return torch.randn(rows, 64, dtype=BF16, requires_grad=True)


def linear(config: FP8Config) -> None:
    layer = convert_to_fp8(nn.Sequential(nn.Linear(64, 32, dtype=BF16)), config)
    layer(_input()).float().square().sum().backward()


def conv1d(config: FP8Config) -> None:
    layer = convert_to_fp8(nn.Sequential(Conv1D(32, 64).bfloat16()), config)
    layer(_input()).float().square().sum().backward()


def merged(config: FP8Config) -> None:
    layers = convert_to_fp8(nn.Sequential(nn.Linear(64, 32, dtype=BF16), nn.Linear(64, 16, dtype=BF16)), config)
    y = MergedLayers(list(layers))(_input())
    (y if y is not None else layers[0](_input())).float().square().sum().backward()


def head(config: FP8Config) -> None:
    weight = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    linear_cross_entropy(_input(), weight, torch.arange(48) % 32, casts=Casts(config)).backward()


def experts(config: FP8Config) -> None:
    sizes = MixtralConfig(hidden_size=64, intermediate_size=32)
    made = convert_to_fp8(nn.ModuleList(MixtralBlockSparseTop2MLP(sizes) for _ in range(2)).bfloat16(), config)
    grouped = GroupedExperts(list(made))
    x = _input()
    chosen = torch.tensor([0] * 32 + [1] * 16).unsqueeze(1)
    y = grouped.mix(Routed(x, chosen, x.detach().new_ones(chosen.shape)))
    if y is None:
        y = torch.cat([expert(_input(16)) for expert in made])
    y.float().square().sum().backward()


CONSUMERS: dict[Callable[[FP8Config], None], dict[str, int]] = {
    linear: {FPROP: 1, DGRAD: 1, WGRAD: 1},
    conv1d: {FPROP: 1, DGRAD: 1, WGRAD: 1},
    merged: {FPROP: 1, DGRAD: 1, WGRAD: 1},
    head: {FPROP: 1, WGRAD: 1, DGRAD: 1},
}
"""What computes products, and how many of each kind, in their order."""


def products_of(compute: Callable[[FP8Config], None], config: FP8Config) -> list[dict[str, Any]]:
    """What every product of a forward and a backward was told."""
    calls: list[dict[str, Any]] = []

    def observed(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **how: Any) -> Any:
        scales = torch.cat([scale_a.reshape(-1), scale_b.reshape(-1)])
        calls.append(
            {
                "formats": (a.dtype, b.dtype),
                "rowwise": scale_a.dim() == 1,
                "power_of_two": bool(scales.frexp()[0].eq(0.5).all()),
                "fast": how["fast_accumulation"],
                "emulate": how["emulate"],
            }
        )
        return product(a, b, scale_a, scale_b, **how)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("fp8booster.") and vars(module).get("product") is product:
                patch.setattr(module, "product", observed)
        torch.manual_seed(0)
        compute(config)
    return calls


def by_kind(compute: Callable[[FP8Config], None], config: FP8Config) -> dict[str, dict[str, Any]]:
    """The same by the kind of product, of which each is computed once."""
    return dict(zip(CONSUMERS[compute], products_of(compute, config), strict=True))


@pytest.mark.parametrize("fast", [FPROP, DGRAD, WGRAD])
@pytest.mark.parametrize("compute", CONSUMERS)
def test_each_product_accumulates_as_its_own_field_says(compute, fast) -> None:
    found = by_kind(compute, FP8Config(fast_accumulation=(fast,)))
    assert {kind: each["fast"] for kind, each in found.items()} == {kind: kind == fast for kind in found}


@pytest.mark.parametrize(
    ("field", "others"),
    [("input_format", {"gradient": E4M3}), ("weight_format", {"gradient": E4M3}), ("gradient_format", {})],
)
@pytest.mark.parametrize("compute", CONSUMERS)
def test_each_operand_has_its_own_format(compute, field, others) -> None:
    config = FP8Config(formats=Formats(**others | {field.removesuffix("_format"): E5M2}))
    found = {kind: sorted(map(str, each["formats"])) for kind, each in by_kind(compute, config).items()}
    operands = {
        FPROP: ("input_format", "weight_format"),
        DGRAD: ("gradient_format", "weight_format"),
        WGRAD: ("gradient_format", "input_format"),
    }
    assert found == {kind: sorted(str(getattr(config, name)) for name in operands[kind]) for kind in found}


@pytest.mark.parametrize("field", ["power_of_two", "emulate", "rowwise"])
@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("compute", CONSUMERS)
def test_all_products_know_how_scales_are_made_and_where_they_run(compute, field, value) -> None:
    rowwise = FP8Config(scaling=RealTime("rowwise" if value else "tensorwise", power_of_two=False))
    if compute is merged and field == "rowwise" and value:
        compute = linear  # rowwise scales are not merged
    powers = FP8Config(scaling=RealTime(power_of_two=value))
    config = {"rowwise": rowwise, "power_of_two": powers, "emulate": FP8Config(emulate=value)}[field]
    assert {kind: each[field] for kind, each in by_kind(compute, config).items()} == dict.fromkeys(
        (FPROP, DGRAD, WGRAD), value
    )


@pytest.mark.parametrize("field", FAST_PRODUCTS)
def test_grouped_products_accumulate_as_their_own_name_says(field, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts: gate and up as one fprop, down as another; so many dgrads and wgrads."""
    monkeypatch.setattr(grouped_linear, "FAST_SUM", 0)
    names = list(FAST_PRODUCTS)
    calls = products_of(experts, FP8Config(fast_accumulation=(field,)))
    fprop, backward = calls[:4], calls[4:]
    assert len(backward) == 8
    # of each of the two layers, the last first: dgrads of both experts, then wgrads
    kinds = names[:1] * 4 + (names[1:2] * 2 + names[2:] * 2) * 2
    assert [each["fast"] for each in (*fprop, *backward)] == [kind == field for kind in kinds]


@pytest.mark.parametrize("field", ["power_of_two", "emulate"])
@pytest.mark.parametrize("value", [False, True])
def test_grouped_products_know_how_scales_are_made_and_where_they_run(field, value) -> None:
    fields = {"emulate": value} if field == "emulate" else {"scaling": RealTime(power_of_two=value)}
    calls = products_of(experts, FP8Config(**fields))
    assert [each[field] for each in calls] == [value] * 12


ELSEWHERE = {
    "layers": "tests/nn/test_convert.py",
    "always": "tests/nn/linear/test_speed_model.py",
    "fused": "tests/plugins/test_low_level_zero_fused.py",
    "cuda_graphs": "tests/plugins/test_cuda_graphs.py",
    "vocabulary_head": "tests/nn/fused/test_causal_lm_loss.py",
    "gradient_accumulation": "tests/colossal/zero/test_gradient_accumulation.py",
    "messages": "tests/colossal/zero/test_gradient_scaling.py",
    "weight_copies": "tests/nn/weights/test_memory.py",
    "activations": "tests/nn/fused/test_recompute.py",
    "high_precision_ends": "tests/nn/test_convert.py",
}
"""Fields that no product reads, and where their effect is tested."""

HERE = {"formats", "fast_accumulation", "scaling", "emulate"}


def test_every_field_has_a_test_of_its_effect(pytestconfig) -> None:
    assert {field.name for field in dataclasses.fields(FP8Config)} == HERE | ELSEWHERE.keys()
    for field, file in ELSEWHERE.items():
        assert field in (pytestconfig.rootpath / file).read_text(), field

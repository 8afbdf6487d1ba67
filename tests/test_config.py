from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, quantize
from fp8booster.config import TRAINING_ALONE, all_but_vocabulary_heads

SWITCHES = (
    "fast_accumulation_fprop",
    "fast_accumulation_dgrad",
    "fast_accumulation_wgrad",
    "power_of_two",
    "communication",
    "emulate",
)


def test_defaults_are_the_hybrid_recipe() -> None:
    config = FP8Config()
    assert (config.input_format, config.weight_format) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert config.gradient_format is torch.float8_e5m2
    assert config.fast_accumulation_fprop
    assert not config.fast_accumulation_dgrad
    assert not config.fast_accumulation_wgrad


@pytest.mark.parametrize("field", ["input_format", "weight_format", "gradient_format"])
@pytest.mark.parametrize("value", [torch.bfloat16, torch.float8_e4m3fnuz, "float8_e4m3fn", 8])
def test_a_wrong_format_names_the_two_allowed(field, value) -> None:
    with pytest.raises(ValueError, match=rf"FP8Config.{field} is .*; use torch.float8_e4m3fn or torch.float8_e5m2"):
        FP8Config(**{field: value})


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, "yes", torch.ones(2)])
def test_a_switch_takes_only_true_or_false(field, value) -> None:
    with pytest.raises(ValueError, match=rf"FP8Config.{field} is .*; use True or False"):
        FP8Config(**{field: value})
    for allowed in (True, False):
        assert getattr(FP8Config(**{field: allowed}), field) is allowed


@pytest.mark.parametrize("value", ["blocks", "TENSORWISE", None, 128])
def test_a_wrong_granularity_names_the_allowed(value) -> None:
    with pytest.raises(ValueError, match=r"FP8Config.granularity is .*; use 'tensorwise'"):
        FP8Config(granularity=value)


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "2"])
def test_layers_at_the_ends_are_counted(value) -> None:
    with pytest.raises(ValueError, match=r"first_last_layers_in_16_bits is .*; give a whole number of layers"):
        FP8Config(first_last_layers_in_16_bits=value)


@pytest.mark.parametrize("value", ["8", 8, True, None, "fp8"])
def test_activations_are_saved_in_16_bits_or_in_8(value) -> None:
    with pytest.raises(ValueError, match=r"FP8Config.saved_activations is .*; use '16-bit' or '8-bit'"):
        FP8Config(saved_activations=value)
    assert not FP8Config().saves_in_8_bits
    assert FP8Config(saved_activations="8-bit").saves_in_8_bits


@pytest.mark.parametrize("value", ["lm_head", None, True, ["q_proj"]])
def test_layers_has_to_be_a_function(value) -> None:
    with pytest.raises(TypeError, match=r"FP8Config.layers is .*; give a function of a layer's name and module"):
        FP8Config(layers=value)


@pytest.mark.parametrize(
    ("one", "other"),
    [("input_format", "weight_format"), ("gradient_format", "weight_format"), ("gradient_format", "input_format")],
)
def test_two_e5m2_operands_of_one_product_are_refused(one, other) -> None:
    formats = dict.fromkeys(("input_format", "weight_format", "gradient_format"), torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"FP8Config.{one} and FP8Config.{other} are both float8_e5m2"):
        FP8Config(**formats | {one: torch.float8_e5m2, other: torch.float8_e5m2})


@pytest.mark.parametrize("field", ["input_format", "weight_format", "gradient_format"])
def test_blockwise_scales_take_e4m3_alone(field) -> None:
    with pytest.raises(ValueError, match=f"FP8Config.{field} is float8_e5m2, and .* multiplies E4M3 alone; use"):
        FP8Config(granularity="blockwise", **{field: torch.float8_e5m2})


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP8Config().power_of_two = True
    with pytest.raises(TypeError):
        FP8Config(all_but_vocabulary_heads)
    with pytest.raises(TypeError, match=r"rounding"):
        FP8Config(rounding="stochastic")


def test_equal_fields_make_equal_configurations_through_pickle_too() -> None:
    config = FP8Config(power_of_two=True)
    assert pickle.loads(pickle.dumps(config)) == config == FP8Config(power_of_two=True)
    assert len({config, FP8Config(power_of_two=True), FP8Config()}) == 2


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("lm_head", False),
        ("model.lm_head", False),
        ("embed_out", False),
        ("layers.0.q_proj", True),
        ("lm_head.proj", True),
        ("", True),
    ],
)
def test_the_vocabulary_head_is_left_out_by_default(name, chosen) -> None:
    assert FP8Config().layers(name, nn.Linear(1, 1)) is chosen


WRONG = {bool: ("no", 1, 0.0), int: (True, 2.0, "2"), float: (True, "1"), str: (3, True)}
"""For a type, values of others that Python would take for it."""


@pytest.mark.parametrize("field", list(dataclasses.fields(FP8Config)), ids=lambda each: each.name)
def test_no_field_takes_a_value_of_another_type(field) -> None:
    default = getattr(FP8Config(), field.name)
    kind = bool if default is None else type(default)
    for value in (*WRONG.get(kind, ("no", 1, True)), [], object()):
        with pytest.raises((TypeError, ValueError), match=f"FP8Config.{field.name} is "):
            FP8Config(**{field.name: value})


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"fused": False, "recompute": "norms"},
            "recompute is 'norms', which fused layers do, and fused is False; use",
        ),
        ({"fused": False, "saved_activations": "8-bit"}, "use saved_activations='16-bit', or leave fused out"),
        (
            {"granularity": "blockwise", "fast_accumulation_dgrad": True},
            "fast_accumulation_dgrad is True, and products",
        ),
        (
            {"granularity": "blockwise", "fast_accumulation_wgrad": True},
            "fast_accumulation_wgrad is True, and products",
        ),
    ],
)
def test_a_field_that_changes_nothing_beside_another_is_refused(fields, says) -> None:
    with pytest.raises(ValueError, match=says):
        FP8Config(**fields)
    for left_out in fields:
        FP8Config(**{name: value for name, value in fields.items() if name != left_out})


@pytest.mark.parametrize("field", sorted(TRAINING_ALONE))
def test_inference_does_not_read_what_is_of_training_alone(field) -> None:
    default = getattr(FP8Config(), field)
    others = {
        torch.dtype: torch.float8_e4m3fn,
        bool: not default,
        type(None): True,
        int: 5,
        str: {"gradient_accumulation": "8-bit", "saved_activations": "8-bit", "recompute": "all"}.get(field, "tensor"),
    }
    needs: dict[str, object] = {"delayed_amax": "most recent"}
    if field in ("delayed_amax", "delayed_history", "delayed_margin", "smooth_swiglu"):
        return  # of a scaling that `quantize` refuses
    scaling = {"scaling": "constant"} if field == "gradient_bias" else {}
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    found = []
    for fields in ({}, {field: needs.get(field, others[type(default)])}):
        config = FP8Config(**scaling, **fields)
        assert bool(fields) == (config != FP8Config(**scaling))
        model = quantize(nn.Sequential(copy.deepcopy(layer)), config)
        with torch.no_grad():
            found.append(model(x))
    assert found[0].equal(found[1])

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, quantize
from fp8booster.comm import Encoding
from fp8booster.config import TRAINING_ALONE, Activations, Formats, WeightCopies, all_but_vocabulary_heads
from fp8booster.scaling import RealTime, Scaling

SWITCHES = ("vocabulary_head", "always", "fused", "emulate")


def test_defaults_are_the_hybrid_recipe() -> None:
    config = FP8Config()
    assert (config.input_format, config.weight_format) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert config.gradient_format is torch.float8_e5m2
    fast = {name: options["fast_accumulation"] for name, options in config.product_options.items()}
    assert fast == {"fprop": True, "dgrad": False, "wgrad": False}
    assert (config.scaling, config.messages) == (RealTime(), Encoding(block_size=256))


def test_there_are_at_most_15_fields() -> None:
    assert len(dataclasses.fields(FP8Config)) <= 15


@pytest.mark.parametrize("field", ["input", "weight", "gradient"])
@pytest.mark.parametrize("value", [torch.bfloat16, torch.float8_e4m3fnuz, "float8_e4m3fn", 8])
def test_a_wrong_format_names_the_two_allowed(field, value) -> None:
    with pytest.raises(ValueError, match=rf"Formats.{field} is .*; use .*torch.float8_e4m3fn or torch.float8_e5m2"):
        Formats(**{field: value})


@pytest.mark.parametrize("field", SWITCHES)
@pytest.mark.parametrize("value", [1, 0, "yes", torch.ones(2)])
def test_a_switch_takes_only_true_or_false(field, value) -> None:
    with pytest.raises(ValueError, match=rf"FP8Config.{field} is .*; use True or False"):
        FP8Config(**{field: value})
    for allowed in (True, False):
        assert getattr(FP8Config(**{field: allowed}), field) is allowed


@pytest.mark.parametrize("value", ["blocks", "TENSORWISE", "real-time"])
def test_a_wrong_scaling_names_the_known(value) -> None:
    with pytest.raises(ValueError, match=r"FP8Config.scaling is .*; use tensorwise, rowwise, blockwise, amax, delayed"):
        FP8Config(scaling=value)


@pytest.mark.parametrize("value", [None, 128, RealTime, True])
def test_a_scaling_that_is_no_object_is_refused(value) -> None:
    with pytest.raises(
        TypeError, match=r"FP8Config.scaling is .*; give a name such as 'delayed', or an fp8booster.scaling.Scaling"
    ):
        FP8Config(scaling=value)


def test_a_scaling_that_cannot_be_hashed_is_refused() -> None:
    class Own(Scaling):
        name = "own"
        __hash__ = None

    with pytest.raises(TypeError, match=r"Own cannot be hashed; .*frozen=True"):
        FP8Config(scaling=Own())


@pytest.mark.parametrize("value", [-1, 1.0, True, None, "2"])
def test_layers_at_the_ends_are_counted(value) -> None:
    with pytest.raises(ValueError, match=r"high_precision_ends is .*; use a whole number from 0"):
        FP8Config(high_precision_ends=value)


@pytest.mark.parametrize("value", ["8", 8, True, None, "fp8"])
def test_activations_are_saved_in_16_bits_or_in_8(value) -> None:
    with pytest.raises(ValueError, match=r"Activations.saved is .*; use '16-bit' or '8-bit'"):
        Activations(saved=value)
    assert not FP8Config().saves_in_8_bits
    assert FP8Config(activations=Activations(saved="8-bit")).saves_in_8_bits


@pytest.mark.parametrize("value", [["fprop"], "fprop", ("fprop", "bprop"), True, None])
def test_fast_products_are_a_tuple_of_names(value) -> None:
    with pytest.raises(ValueError, match=r"FP8Config.fast_accumulation is .*; give a tuple of names, of"):
        FP8Config(fast_accumulation=value)


@pytest.mark.parametrize("value", ["lm_head", None, True, ["q_proj"]])
def test_layers_has_to_be_a_function(value) -> None:
    with pytest.raises(TypeError, match=r"FP8Config.layers is .*; give a function of a layer's name and module"):
        FP8Config(layers=value)


@pytest.mark.parametrize(("one", "other"), [("input", "weight"), ("gradient", "weight"), ("gradient", "input")])
def test_two_e5m2_operands_of_one_product_are_refused(one, other) -> None:
    formats = dict.fromkeys(("input", "weight", "gradient"), torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=f"Formats.{one} and Formats.{other} are both float8_e5m2"):
        FP8Config(formats=Formats(**formats | {one: torch.float8_e5m2, other: torch.float8_e5m2}))


@pytest.mark.parametrize("field", ["input", "weight", "gradient"])
def test_blockwise_scales_take_e4m3_alone(field) -> None:
    with pytest.raises(ValueError, match=f"Formats.{field} is float8_e5m2, and .* multiplies E4M3 alone; use"):
        FP8Config(scaling="blockwise", formats=Formats(**{field: torch.float8_e5m2}))


def test_it_is_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        FP8Config().always = True
    with pytest.raises(TypeError):
        FP8Config(all_but_vocabulary_heads)
    with pytest.raises(TypeError, match=r"rounding"):
        FP8Config(rounding="stochastic")


def test_equal_fields_make_equal_configurations_through_pickle_too() -> None:
    config = FP8Config(scaling="amax")
    assert pickle.loads(pickle.dumps(config)) == config == FP8Config(scaling="amax")
    assert len({config, FP8Config(scaling="amax"), FP8Config()}) == 2


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
            {"fused": False, "activations": Activations(recompute="norms")},
            "recompute='norms'.*, which fused layers do, and fused is False; leave one",
        ),
        ({"fused": False, "activations": Activations(saved="8-bit")}, "saved='8-bit'.*, which fused layers do"),
        ({"scaling": "blockwise", "fast_accumulation": ("fprop", "dgrad")}, "dgrad.*, and products with blockwise"),
        ({"scaling": "blockwise", "fast_accumulation": ("fprop", "wgrad")}, "wgrad.*, and products with blockwise"),
    ],
)
def test_a_field_that_changes_nothing_beside_another_is_refused(fields, says) -> None:
    with pytest.raises(ValueError, match=says):
        FP8Config(**fields)
    for left_out in fields:
        FP8Config(**{name: value for name, value in fields.items() if name != left_out})


OF_TRAINING = {
    "messages": {"messages": None},
    "weight_copies": {"weight_copies": WeightCopies(transposes=False)},
    "cuda_graphs": {"cuda_graphs": True},
    "activations": {"activations": Activations(saved="8-bit", recompute="all")},
    "gradient_accumulation": {"gradient_accumulation": "8-bit"},
    "formats.gradient": {"formats": Formats(gradient=torch.float8_e4m3fn)},
}


@pytest.mark.parametrize("field", sorted(TRAINING_ALONE))
def test_inference_does_not_read_what_is_of_training_alone(field) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64, dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    found = []
    for fields in ({}, OF_TRAINING[field]):
        config = FP8Config(**fields)
        assert bool(fields) == (config != FP8Config())
        model = quantize(nn.Sequential(copy.deepcopy(layer)), config)
        with torch.no_grad():
            found.append(model(x))
    assert found[0].equal(found[1])

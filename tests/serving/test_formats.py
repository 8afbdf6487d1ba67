"""Casts of weights for checkpoints, and what undoes them."""

from __future__ import annotations

import pytest
import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import RealTime
from fp8booster.serving.formats import CHECKPOINT_FORMATS, block_of, decode, granularity_of

ROWS, COLUMNS = 200, 144
SHAPES = {
    "fine-grained": (2, 2),
    "compressed-tensors": (ROWS, 1),
    "compressed-tensors-tensorwise": (),
    "tensorwise": (),
}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}

BLOCKS_OF_64 = {"weights": {"num_bits": 8, "type": "float", "block_structure": [64, 64]}}


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
def test_a_cast_has_the_bytes_of_training_and_decodes_to_their_values(device, name):
    chosen = CHECKPOINT_FORMATS[name]
    weight = torch.randn(ROWS, COLUMNS, device=device).bfloat16()
    weight[:128] *= 16  # scales differ
    config = FP8Config(scaling=chosen.granularity)
    data, scale = chosen.cast(weight, power_of_two=config.power_of_two)
    trained = Casts(config).quantize_weight(weight, transposed=False)
    assert data.shape == weight.shape
    assert scale.shape == SHAPES[name]
    assert torch.equal(data.view(torch.uint8), trained.data[:ROWS, :COLUMNS].view(torch.uint8))
    block = (128, 128) if name == "fine-grained" else None
    values = decode(data, scale, block, "weight")
    assert torch.equal(values, trained.dequantize(ROWS, COLUMNS))
    assert (values - weight.float()).abs().max() < weight.float().abs().max() / 16


def test_a_scale_of_each_block_is_for_its_128_rows_and_columns():
    data = torch.ones(130, 129).to(E4M3)
    values = decode(data, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), (128, 128), "weight")
    assert values[127, 127] == 1
    assert values[127, 128] == 2
    assert values[128, 127] == 3
    assert values[129, 128] == 4


def test_stacked_weights_have_blocks_of_their_own():
    data = torch.ones(3, 4, 6).to(E4M3)
    scale = torch.arange(1, 13).view(3, 2, 2).float()
    values = decode(data, scale, (2, 3), "weight")
    for each in range(3):
        assert torch.equal(values[each], decode(data[each], scale[each], (2, 3), "weight"))
    assert values[2, 3, 5] == 12


@pytest.mark.parametrize(
    ("scale", "block", "expected"),
    [
        ((), None, "tensorwise"),
        ((1,), None, "tensorwise"),
        ((1,), (128, 128), "tensorwise"),
        ((300,), None, "rowwise"),
        ((300, 1), None, "rowwise"),
        ((3, 1), (128, 128), "blockwise"),
        ((100,), None, None),
        ((1, 100), None, None),
        ((1, 3), (128, 128), None),
        ((3, 1), None, None),
        ((300, 1), (1, 128), None),
        ((300,), (128, 128), None),
        ((3, 2), (128, 64), None),
    ],
)
def test_the_granularity_is_told_by_both_shapes_and_the_blocks(scale, block, expected):
    assert granularity_of((300, 100), scale, block) == expected


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("asked", [True, False])
def test_scales_are_rounded_as_in_training_where_that_has_scales_of_this_kind(name, granularity, asked):
    chosen = CHECKPOINT_FORMATS[name]
    as_trained = granularity == chosen.granularity
    expected = asked if as_trained else chosen.granularity != "tensorwise"
    assert chosen.power_of_two(FP8Config(scaling=RealTime(granularity, power_of_two=asked))) is expected


@pytest.mark.parametrize("shape", [(128,), (128, 1)])
def test_a_scale_of_each_row_multiplies_its_row(shape):
    """The weight is square: the scale would fit its columns too."""
    scale = torch.arange(1, 129, dtype=torch.float32)
    values = decode(torch.ones(128, 128).to(E4M3), scale.view(shape), None, "weight")
    assert torch.equal(values, scale[:, None].expand(128, 128))


@pytest.mark.parametrize("kind", [E4M3, torch.float8_e5m2])
def test_each_fp8_type_is_decoded_as_what_it_is(kind):
    values = torch.tensor([[0.25, 3.0], [-1.5, 112.0]])
    scale = torch.tensor(2.0, dtype=torch.bfloat16)
    found = decode(values.to(kind), scale, None, "weight")
    assert torch.equal(found, values * 2)
    assert found.dtype is torch.float32


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float16])
def test_what_is_not_in_fp8_is_not_decoded(kind):
    with pytest.raises(ValueError, match=rf"weight is {kind} with scales of torch.float32; copy the model again"):
        decode(torch.ones(4, 4, dtype=kind), torch.ones(()), None, "weight")


@pytest.mark.parametrize(
    ("scale", "block", "words"),
    [
        (torch.ones(2, 2), None, "do not fit"),
        (torch.ones(3, 2), (128, 128), "do not fit"),
        (torch.ones((), dtype=torch.uint8), None, "scales of torch.uint8"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scale, block, words):
    with pytest.raises(ValueError, match=words):
        decode(torch.ones(ROWS, COLUMNS).to(E4M3), scale, block, "weight")


@pytest.mark.parametrize(
    ("settings", "block"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, (128, 64)),
        ({"quant_method": "fp8"}, None),
        (COMPRESSED, None),
        ({**COMPRESSED, "config_groups": {"a": BLOCKS_OF_64, "b": BLOCKS_OF_64}}, (64, 64)),
        *(
            (each.settings(["lm_head"]), (128, 128) if name == "fine-grained" else None)
            for name, each in CHECKPOINT_FORMATS.items()
        ),
    ],
)
def test_blocks_are_those_of_the_config(settings, block):
    assert block_of(settings, "config.json") == block


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "awq"}, "quant_method 'awq'"),
        ([], "quant_method None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [-128, 128]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128.0, 128.0]}, "two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "two whole numbers"),
        ({"quant_method": "compressed-tensors"}, "0 sizes"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "float"}}}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": {**COMPRESSED["config_groups"], "b": BLOCKS_OF_64}}, "2 sizes"),
        ({**COMPRESSED, "config_groups": {"a": None}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": []}, "0 sizes"),
    ],
)
def test_other_quantizations_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        block_of(settings, "config.json")


def test_blocks_need_not_be_square() -> None:
    data = torch.randn(7, 9).to(E4M3)
    scale = torch.rand(4, 3) + 0.5
    whole = scale.repeat_interleave(2, 0)[:7].repeat_interleave(4, 1)[:, :9]
    assert torch.equal(decode(data, scale, (2, 4), "weight"), data.float() * whole)

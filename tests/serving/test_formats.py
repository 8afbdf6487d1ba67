"""Casts of weights for checkpoints, and what undoes them."""

from __future__ import annotations

import pytest
import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.serving.formats import CHECKPOINT_FORMATS, block_of, decode
from fp8booster.tensor import quantize

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


@pytest.mark.parametrize("name", CHECKPOINT_FORMATS)
def test_a_cast_has_the_bytes_of_training_and_decodes_to_their_values(device, name):
    chosen = CHECKPOINT_FORMATS[name]
    weight = torch.randn(ROWS, COLUMNS, device=device).bfloat16()
    weight[:128] *= 16  # scales differ
    config = FP8Config(granularity=chosen.granularity)
    data, scale = chosen.cast(weight, power_of_two=config.power_of_two)
    trained = quantize(weight, E4M3, scale_for=config.weight_scale_for, power_of_two=config.power_of_two)
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
        ({"quant_method": "compressed-tensors"}, "0 sizes"),
        ({**COMPRESSED, "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": {"a": None}}, "not in FP8"),
        ({**COMPRESSED, "config_groups": []}, "0 sizes"),
    ],
)
def test_other_quantizations_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        block_of(settings, "config.json")

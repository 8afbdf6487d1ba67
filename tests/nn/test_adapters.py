"""Adapters of peft that are merged into an FP8 base, and taken out again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, forget_weights
from fp8booster.nn.weights.engine import EngineWeight

peft = pytest.importorskip("peft")


def test_a_layer_in_training_mode_sees_merged_and_unmerged_adapters(device) -> None:
    config = peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(64, 64)).to(device, torch.bfloat16), config)
    convert_to_fp8(model, FP8Config(always=True, emulate=device.type == "cpu"))
    base = model.base_model.model[0].base_layer
    assert type(base) is FP8Linear
    model.train()
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    apart, before = model(x), base(x)
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        found, output = base(x), model(x)
        assert (output - apart).norm() < 0.1 * apart.norm()
        forget_weights(model)
        assert torch.equal(found, base(x))
        assert not torch.equal(found, before)
        before = found


@pytest.mark.parametrize("change", ["merge_adapter", "unmerge_adapter"])
def test_adapters_are_added_to_weights_that_an_engine_keeps_in_fp8_alone(change) -> None:
    config = peft.LoraConfig(r=8, target_modules=["0"], init_lora_weights=False)
    model = peft.get_peft_model(nn.Sequential(nn.Linear(64, 64)).bfloat16(), config)
    convert_to_fp8(model, FP8Config(always=True))
    if change == "unmerge_adapter":
        model.merge_adapter()
    base = model.base_model.model[0].base_layer
    values = base.weight.detach().clone()
    base.fp8_weight = EngineWeight(restore=lambda: base.weight.data.copy_(values))
    base.weight.data.fill_(torch.nan)
    getattr(model, change)()
    assert base.weight.isfinite().all()
    assert not torch.equal(base.weight, values)

"""Adapters of peft on an FP8 base: merged and taken out again, and on a base that is kept in FP8 alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, forget_weights, quantize
from fp8booster.nn import FrozenFP8Linear
from fp8booster.nn.adapters import merged_weight
from fp8booster.nn.linear import frozen
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


def adapted(layers: nn.Module, *, dora: bool = False) -> Any:
    """A model with adapters that are not zero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=False, use_dora=dora)
    return peft.get_peft_model(layers, config)


def base_of(model: Any, number: int = 0) -> FrozenFP8Linear:
    base = model.base_model.model[number].base_layer
    assert type(base) is FrozenFP8Linear
    return base


def frozen_and_decoded(device: torch.device, config: FP8Config) -> tuple[nn.Sequential, nn.Sequential]:
    """Two layers whose weights are kept in FP8 alone, and the same with these values in 16 bits."""
    layers = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)).to(device, torch.bfloat16)
    in_16_bits = copy.deepcopy(layers)
    for number in (0, 2):
        FrozenFP8Linear.convert_in_place(layers[number], config)
        in_16_bits[number].weight.data = layers[number].weight
    return layers, in_16_bits


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
def test_adapters_on_a_frozen_fp8_base_compute_as_on_its_values(device, granularity, dora) -> None:
    config = FP8Config(scaling=granularity, always=True)
    model, reference = (adapted(layers, dora=dora) for layers in frozen_and_decoded(device, config))
    x = torch.randn(128, 64, dtype=torch.bfloat16, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    found, expected = model(inputs[0]), reference(inputs[1])
    assert (found - expected).norm() < 0.06 * expected.norm()
    for output in (found, expected):
        output.float().square().sum().backward()
    assert (inputs[0].grad - inputs[1].grad).norm() < 0.12 * inputs[1].grad.norm()
    trained = [dict(each.named_parameters()) for each in (model, reference)]
    names = {name for name, value in trained[0].items() if value.grad is not None}
    assert names == {name for name in trained[0] if "lora_" in name}
    for name in names:
        there = trained[1][name].grad
        assert (trained[0][name].grad - there).norm() < 0.12 * there.norm(), name


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_merged_adapters_are_in_the_fp8_bytes_and_unmerging_gives_those_before_back(device, dora) -> None:
    model, reference = (adapted(layers, dora=dora) for layers in frozen_and_decoded(device, FP8Config(always=True)))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    expected = reference(x)
    reference.merge_adapter()
    bytes_before, scale_before = base_of(model).fp8_data.clone(), base_of(model).fp8_inverse_scale.clone()
    value = merged_weight(model.base_model.model[0])
    assert (value - reference.base_model.model[0].base_layer.weight).abs().max() < 4e-3
    assert torch.equal(base_of(model).fp8_data, bytes_before)
    model.merge_adapter()
    assert base_of(model).weight_dtype is torch.bfloat16
    assert (base_of(model).weight - value).norm() < 0.04 * value.norm()
    assert (model(x) - expected).norm() < 0.08 * expected.norm()
    model.unmerge_adapter()
    assert torch.equal(base_of(model).fp8_data, bytes_before)
    assert torch.equal(base_of(model).fp8_inverse_scale, scale_before)
    merged = model.merge_and_unload()
    assert [type(merged[number]) for number in (0, 2)] == [FrozenFP8Linear] * 2
    assert (merged(x) - expected).norm() < 0.08 * expected.norm()


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_adapters_that_are_taken_out_of_the_weight_are_for_weights_in_16_bits(device, how) -> None:
    layers, in_16_bits = frozen_and_decoded(device, FP8Config(always=True))
    x = torch.randn(32, 64, dtype=torch.bfloat16, device=device)
    config = peft.LoraConfig(r=8, target_modules=["0", "2"], init_lora_weights=how)
    expected = in_16_bits(x)
    with pytest.raises(ValueError, match=f"{how}_init of peft changes the weight .*; use init_lora_weights=True, or"):
        peft.get_peft_model(layers, config)
    convert_to_fp8(in_16_bits, FP8Config(always=True)).train()(x)  # which casts the weights before they change
    adapted = peft.get_peft_model(in_16_bits, config)
    for model in (adapted, quantize(copy.deepcopy(adapted))):
        assert (model(x) - expected).norm() < 0.08 * expected.norm()


def test_a_merge_that_fails_leaves_the_bytes(device) -> None:
    model = adapted(frozen_and_decoded(device, FP8Config(always=True))[0])
    before = base_of(model).fp8_data.clone()
    with torch.no_grad():
        model.base_model.model[0].lora_A["default"].weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        model.base_model.model[0].merge(safe_merge=True)
    assert torch.equal(base_of(model).fp8_data, before)


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_a_step_keeps_one_byte_a_frozen_value_and_nothing_decoded(device, monkeypatch, dora) -> None:
    layers = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).to(device, torch.bfloat16)
    values = sum(layers[number].weight.numel() for number in (0, 2))
    for number in (0, 2):
        FrozenFP8Linear.convert_in_place(layers[number], FP8Config(always=True))
    held = sum(each.untyped_storage().nbytes() for number in (0, 2) for each in held_by(layers[number]))
    assert held == values + 2 * 4 + (512 + 256) * 2  # scales, and biases
    model = convert_to_fp8(adapted(layers, dora=dora), FP8Config(always=True))
    decoded: list[None] = []
    monkeypatch.setattr(frozen, "before_decoding", [lambda: decoded.append(None)])
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        output = model(torch.randn(16, 256, dtype=torch.bfloat16, device=device))
    output.float().square().sum().backward()
    assert len(decoded) == (2 if dora else 0)  # for DoRA's norm, which is not saved
    assert max(tensor.numel() for tensor in saved) < 256 * 512
    after = sum(each.untyped_storage().nbytes() for number in (0, 2) for each in held_by(base_of(model, number)))
    assert after == held


def held_by(layer: nn.Module) -> list[torch.Tensor]:
    """Every tensor that a layer's attributes hold."""
    attributes = [*vars(layer).values(), *layer._parameters.values(), *layer._buffers.values()]
    return [each for each in attributes if isinstance(each, torch.Tensor)]

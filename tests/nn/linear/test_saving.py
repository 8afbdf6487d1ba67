"""What is written of models whose weights are kept in FP8 alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig
from safetensors.torch import load_file, load_model, save_model
from torch import nn
from transformers import AutoModelForCausalLM

from fp8booster import FP8Config, convert_to_fp8, quantize
from fp8booster.nn import FrozenFP8Linear
from tests.nn.models import tiny_gpt2, tiny_llama

REFUSED = r"would write as if they had no scales; write it with fp8booster\.export\(model, folder\)"


def of_one_layer() -> nn.Module:
    model = tiny_llama().bfloat16()
    FrozenFP8Linear.convert_in_place(model.model.layers[0].mlp.up_proj, FP8Config())
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: quantize(tiny_llama().bfloat16()),
        lambda: quantize(tiny_gpt2().bfloat16()),
        of_one_layer,
        lambda: copy.deepcopy(quantize(tiny_llama().bfloat16())),
        lambda: pickle.loads(pickle.dumps(quantize(tiny_llama().bfloat16()))),
    ],
    ids=["llama", "gpt2", "one layer", "copied", "pickled"],
)
def test_transformers_does_not_write_fp8_without_its_scales(tmp_path, make: Callable[[], nn.Module]) -> None:
    model = make()
    for state in ({}, {"state_dict": model.state_dict()}):
        with pytest.raises(ValueError, match=REFUSED):
            model.save_pretrained(tmp_path / "model", **state)
    assert not (tmp_path / "model").exists()


def test_other_models_are_written_as_before(tmp_path) -> None:
    frozen = quantize(tiny_llama().bfloat16())
    for name, model in (("plain", tiny_llama().bfloat16()), ("fp8", convert_to_fp8(tiny_llama().bfloat16()))):
        model.save_pretrained(tmp_path / name)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / name, torch_dtype=torch.bfloat16)
        for key, value in again.state_dict().items():
            assert torch.equal(value, model.state_dict()[key]), key
    values = tiny_llama().bfloat16().state_dict()
    frozen.save_pretrained(tmp_path / "given", state_dict=dict(values))  # transformers 5 empties it
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "given", torch_dtype=torch.bfloat16)
    assert all(torch.equal(value, values[key]) for key, value in again.state_dict().items())


@pytest.mark.skipif(
    transformers.__version__ >= "5" and Version(peft.__version__) < Version("0.22"),
    reason="transformers 5 adds adapters of a later peft",
)
def test_adapters_alone_are_written(tmp_path) -> None:
    model = quantize(tiny_llama().bfloat16())
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()
    with pytest.raises(ValueError, match=REFUSED):
        model.save_pretrained(tmp_path, save_peft_format=False)


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("write", ["torch", "safetensors"])
def test_a_state_that_is_written_is_read_into_a_model_that_was_quantized_alike(tmp_path, granularity, write) -> None:
    def quantized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(120, 248), nn.Linear(248, 240, bias=False)).bfloat16()  # sizes are padded
        return quantize(layers, FP8Config(scaling=granularity, emulate=True))

    written, read, file = quantized(0), quantized(1), str(tmp_path / "state")
    assert all(isinstance(layer, FrozenFP8Linear) for layer in written)
    if write == "torch":
        torch.save(written.state_dict(), file)
        read.load_state_dict(torch.load(file))
    else:
        save_model(written, file)
        assert load_model(read, file) == (set(), [])
    x = torch.randn(16, 120, dtype=torch.bfloat16)
    assert torch.equal(written(x), read(x))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("weight", lambda codes: codes.view(torch.uint8).fill_(0x7F).view(codes.dtype), "values that are not finite"),
        ("weight_scale_inv", torch.neg, "scales that are not finite numbers above 0"),
        ("weight_scale_inv", lambda scale: scale * torch.nan, "scales that are not finite numbers above 0"),
        ("weight_scale_inv", lambda scale: scale.to(torch.int32), "scales of torch.int32 are no floating-point"),
    ],
)
def test_a_state_of_damaged_values_is_refused(name, change, words) -> None:
    layer = quantize(nn.Linear(64, 64).bfloat16())
    state = layer.state_dict()
    before = layer.weight.clone()
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict({**state, name: change(state[name].clone())})
    assert torch.equal(layer.weight, before)

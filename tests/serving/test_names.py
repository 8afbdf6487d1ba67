"""Models whose tensors have other names in files than in memory, as transformers 5 has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, MixtralConfig, MixtralForCausalLM

from fp8booster import FP8Config, convert_to_fp8, export, fuse, load_fp8
from fp8booster.serving.frozen import load_frozen

MAJOR = int(transformers.__version__.split(".")[0])
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
HEAD = "embed_out.weight"
"""In the files of each version."""


def neox() -> Any:
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)).bfloat16().eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)).bfloat16().eval()


def head(model: Any) -> torch.Tensor:
    return model.get_output_embeddings().weight


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    neox().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("format", ["fine-grained", "compressed-tensors", "bf16"])
def test_a_renamed_head_is_exported_under_its_name_in_files(folder, tmp_path, format) -> None:
    model = neox()
    live = export(model, tmp_path / "live", format=format)
    stored = export(folder, tmp_path / "stored", format=format)
    assert (live.layers, live.kept, live.bytes) == (stored.layers, stored.kept, stored.bytes)
    assert live.layers == (0 if format == "bf16" else 8)
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
    assert one.keys() == many.keys()
    assert torch.equal(one[HEAD], head(model))
    assert torch.equal(many[HEAD], head(model))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_renamed_head_is_read_from_an_fp8_folder(folder, tmp_path, frozen) -> None:
    export(folder, tmp_path / "fp8")
    loaded = load_fp8(tmp_path / "fp8", frozen=frozen)
    assert torch.equal(head(loaded), head(neox()))
    exported = export(loaded, tmp_path / "again")
    assert exported.layers == 8


def test_a_renamed_head_is_read_where_weights_are_frozen_as_they_are_loaded(folder) -> None:
    assert torch.equal(head(load_frozen(folder, FP8Config())), head(neox()))


def test_a_renamed_head_in_fp8_is_read_with_its_scale(folder, tmp_path) -> None:
    exported = export(folder, tmp_path / "fp8", config=FP8Config(vocabulary_head=True))
    assert (exported.layers, exported.kept) == (9, ())
    layer = load_fp8(tmp_path / "fp8", frozen=True).get_output_embeddings()
    saved = load_file(tmp_path / "fp8" / "model.safetensors")
    assert torch.equal(layer.state_dict()["weight"].view(torch.uint8), saved[HEAD].view(torch.uint8))


def test_a_folder_with_the_names_of_the_model_in_memory_is_read(folder, tmp_path) -> None:
    weights = folder / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight" if hasattr(neox(), "lm_head") else HEAD] = tensors.pop(HEAD)
    save_file(tensors, weights, metadata={"format": "pt"})
    export(folder, tmp_path / "fp8")
    for loaded in (load_fp8(tmp_path / "fp8", frozen=True), load_frozen(folder, FP8Config())):
        assert torch.equal(head(loaded), head(neox()))


def test_a_fused_model_has_the_same_names_in_files(tmp_path) -> None:
    model = neox()
    convert_to_fp8(model)
    fuse(model)
    export(model, tmp_path / "fp8")
    assert HEAD in load_file(tmp_path / "fp8" / "model.safetensors")


def test_the_config_names_a_layer_in_16_bits_as_files_and_as_the_model_do(folder, tmp_path) -> None:
    export(folder, tmp_path / "fp8")
    kept = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    linears = [name for name, module in neox().named_modules() if isinstance(module, nn.Linear)]
    assert set(kept) == {"embed_out", linears[-1]}


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 holds experts as linear layers")
def test_experts_that_transformers_stacks_have_no_frozen_form(tmp_path) -> None:
    mixtral().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"holds the experts of .* one by one.*; load it without frozen, or with"):
        load_frozen(tmp_path / "model", FP8Config())

"""Models whose tensors have other names in files than in memory, as transformers 5 has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fp8booster import FP8Config, convert_to_fp8, fuse, load_fp8
from fp8booster.serving.formats import CHECKPOINT_FORMATS
from fp8booster.serving.read import load_frozen
from tests.serving.folders import export

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


def test_a_renamed_head_in_fp8_is_read_with_its_scale(folder, tmp_path) -> None:
    exported = export(folder, tmp_path / "fp8", config=FP8Config(vocabulary_head=True))
    assert (exported.layers, exported.kept) == (9, ())
    layer = load_fp8(tmp_path / "fp8", frozen=True).get_output_embeddings()
    saved = load_file(tmp_path / "fp8" / "model.safetensors")
    assert torch.equal(layer.state_dict()["weight"].view(torch.uint8), saved[HEAD].view(torch.uint8))


def test_a_folder_with_the_names_of_files_or_of_the_model_in_memory_is_read(folder, tmp_path) -> None:
    assert torch.equal(head(load_frozen(folder, FP8Config())), head(neox()))
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
    with pytest.raises(ValueError, match=r"holds the experts of .* one by one.*; load it without frozen .*, or with"):
        load_frozen(tmp_path / "model", FP8Config())


def qwen_moe() -> Any:
    torch.manual_seed(0)
    options = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**SIZES, num_key_value_heads=2, head_dim=16, **options)
    return Qwen3MoeForCausalLM(config).bfloat16().eval()


def linear_layers(block: str, up: tuple[str, str], down: str) -> set[str]:
    """Return the linear layers that files have in FP8: attention's, and those of four experts."""
    layers = [f"model.layers.{number}" for number in range(2)]
    experts = {f"{layer}.{block}.experts.{n}.{name}" for layer in layers for n in range(4) for name in (*up, down)}
    return experts | {f"{layer}.self_attn.{name}_proj" for layer in layers for name in "qkvo"}


EXPERTS = {
    "mixtral": (mixtral, "block_sparse_moe", ("w1", "w3"), "w2"),
    "qwen": (qwen_moe, "mlp", ("gate_proj", "up_proj"), "down_proj"),
}
"""A model, and in files where its blocks of experts are, and what of them makes more features and fewer."""


@pytest.mark.parametrize("format", CHECKPOINT_FORMATS)
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_exported_one_by_one_under_either_version(tmp_path, family, format) -> None:
    make, block, up, down = EXPERTS[family]
    model = make()
    model.save_pretrained(tmp_path / "model")
    live = export(model, tmp_path / "live", format=format)
    stored = export(tmp_path / "model", tmp_path / "stored", format=format)
    routers = {f"model.layers.{number}.{block}.gate" for number in range(2)}
    assert set(live.kept) == set(stored.kept) == {"lm_head", *routers}
    assert live.layers == stored.layers == 32
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("live", "stored"))
    assert one.keys() == many.keys()
    assert all(torch.equal(value.float(), many[name].float()) for name, value in one.items())
    scale = CHECKPOINT_FORMATS[format].scale_name
    assert {name for name in one if name.endswith(scale)} == {
        f"{name}.{scale}" for name in linear_layers(block, up, down)
    }
    assert {name for name in one if not name.endswith(scale)} == set(load_file(tmp_path / "model/model.safetensors"))


@pytest.mark.parametrize("family", EXPERTS)
def test_exported_experts_come_back_with_the_values_that_were_written(tmp_path, family) -> None:
    model = EXPERTS[family][0]()
    export(model, tmp_path / "fp8")
    loaded = load_fp8(tmp_path / "fp8")
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert (state[name].float() - value.float()).norm() <= 0.04 * value.float().norm(), name
    loaded.save_pretrained(tmp_path / "16 bits")
    export(tmp_path / "16 bits", tmp_path / "again")
    one, many = (load_file(tmp_path / name / "model.safetensors") for name in ("fp8", "again"))
    assert all(torch.equal(value.float(), many[name].float()) for name, value in one.items())


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_of_an_fp8_folder_are_written_in_16_bits_one_by_one(tmp_path, family) -> None:
    model = EXPERTS[family][0]()
    model.save_pretrained(tmp_path / "model")
    export(tmp_path / "model", tmp_path / "fp8")
    export(tmp_path / "fp8", tmp_path / "16 bits", format="bf16")
    export(model, tmp_path / "live", format="bf16")
    names = load_file(tmp_path / "model/model.safetensors").keys()
    for folder in ("16 bits", "live"):
        assert load_file(tmp_path / folder / "model.safetensors").keys() == names


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 holds experts as linear layers")
def test_experts_of_a_parameter_share_the_scale_that_training_has(tmp_path) -> None:
    model = mixtral()
    export(model, tmp_path / "fp8", format="tensorwise")
    saved = load_file(tmp_path / "fp8" / "model.safetensors")
    stack = model.model.layers[1].mlp.experts.gate_up_proj
    made, scale = CHECKPOINT_FORMATS["tensorwise"].cast(stack.flatten(0, 1), power_of_two=FP8Config().power_of_two)
    made = made.unflatten(0, stack.shape[:2])
    for number in range(4):
        for name, expected in zip(("w1", "w3"), made[number].chunk(2), strict=True):
            there = f"model.layers.1.block_sparse_moe.experts.{number}.{name}.weight"
            assert torch.equal(saved[there].view(torch.uint8), expected.view(torch.uint8)), there
            assert saved[f"{there}_scale_inv"] == scale, there


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 holds experts as linear layers")
def test_experts_that_train_in_16_bits_are_exported_so(tmp_path) -> None:
    exported = export(mixtral(), tmp_path / "fp8", config=FP8Config(scaling="rowwise"))
    assert exported.layers == 8
    assert "model.layers.1.block_sparse_moe.experts.3.w2" in exported.kept
    settings = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert "model.layers.1.mlp.experts" in settings["modules_to_not_convert"]


@pytest.mark.skipif(MAJOR < 5, reason="gpt-oss is not there before")
def test_experts_that_are_one_parameter_in_files_too_stay_in_16_bits(tmp_path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(**SIZES, num_key_value_heads=2, head_dim=16, num_local_experts=4)
    model = GptOssForCausalLM(config).bfloat16()
    exported = export(model, tmp_path / "fp8", engine_ranks=None)
    assert "model.layers.0.mlp.experts" in exported.kept
    with safe_open(next((tmp_path / "fp8").glob("*.safetensors")), "pt") as file:
        stored = file.get_tensor("model.layers.0.mlp.experts.down_proj")
    assert torch.equal(stored, model.model.layers[0].mlp.experts.down_proj)


@pytest.mark.skipif(MAJOR < 5, reason="transformers 4 holds experts as linear layers")
@pytest.mark.parametrize("format", ["compressed-tensors", "bf16"])
def test_experts_that_were_saved_as_the_model_holds_them_are_exported_one_by_one(tmp_path, format) -> None:
    """As Colossal-AI saves them, in whatever plugin."""
    model = mixtral()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "booster").mkdir()
    model.config.save_pretrained(tmp_path / "booster")
    save_file(model.state_dict(), tmp_path / "booster" / "model.safetensors", metadata={"format": "pt"})
    for name in ("model", "booster"):
        export(tmp_path / name, tmp_path / f"{name}-exported", format=format)
    one, other = (load_file(tmp_path / f"{name}-exported" / "model.safetensors") for name in ("model", "booster"))
    assert one.keys() == other.keys()
    assert sum(".experts." in name for name in one) >= 2 * 4 * 3
    assert all(
        torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one if one[name].dim()
    )

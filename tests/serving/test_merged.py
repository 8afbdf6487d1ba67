"""Adapters that are merged into the folder they were trained on: in 16 bits and in FP8, from 16 bits and from FP8."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from fp8booster import FP8Config, load_fp8
from fp8booster.nn.quantize import freeze
from fp8booster.serving.folder import Merged
from fp8booster.serving.formats import CHECKPOINT_FORMATS
from fp8booster.training.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from tests.colossal.models import tiny_llama, token_batch
from tests.nn.models import tiny_gpt2
from tests.serving.folders import bits, export, files

peft = pytest.importorskip("peft")

ENDS = ("q_proj", "down_proj")
FORMATS = list(CHECKPOINT_FORMATS)


def model() -> Any:
    torch.manual_seed(0)
    return tiny_llama(hidden_size=128, intermediate_size=256, head_dim=32).bfloat16()


def adapters_on(base: Any, folder: Path, ends: Sequence[str] = ENDS, **options: Any) -> Any:
    """Save adapters that are not zero, and give the model with them."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules=list(ends), init_lora_weights=False, use_rslora=True, **options
    )
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "lora_magnitude" in name:
                value.mul_(1.2)
            elif "lora_B" in name:
                value.mul_(0.2)
            elif "lora_embedding" in name:
                value.mul_(0.1)
    adapted.save_pretrained(folder)
    return adapted.eval()


def in_16_bits(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16, local_files_only=True).eval()


def has_adapters(name: str) -> bool:
    return any(f".{end}." in name for end in ENDS)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(token_batch(0)).logits.float()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def require_merged(folder: Path, adapted: Any) -> None:
    """Require the model in "out", and not that in "base", to compute what the adapted one does."""
    expected = logits(adapted)
    assert distance(logits(in_16_bits(folder / "base")), expected) > 0.1
    assert distance(logits(in_16_bits(folder / "out")), expected) < 0.02


@pytest.fixture
def base(tmp_path: Path) -> Path:
    model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_merged_in_16_bits_it_is_the_adapted_model(base, tmp_path, dora) -> None:
    adapted = adapters_on(in_16_bits(base), tmp_path / "adapters", use_dora=dora)
    done = export(tmp_path / "adapters", tmp_path / "out", format="bf16")
    assert (done.merged, done.layers) == (4, 0)
    assert not hasattr(in_16_bits(tmp_path / "out").config, "quantization_config")
    require_merged(tmp_path, adapted)
    before, after = files(base), files(tmp_path / "out")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(after[name], value) != has_adapters(name), name
    # one rounding, of the sum in FP32
    exact = adapted.float().merge_and_unload().state_dict()
    for name in filter(has_adapters, after):
        torch.testing.assert_close(after[name].float(), exact[name], rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("format", FORMATS)
def test_merged_in_fp8_it_computes_as_the_adapted_model(base, tmp_path, format) -> None:
    adapted = adapters_on(in_16_bits(base), tmp_path / "adapters")
    done = export(tmp_path / "adapters", tmp_path / "out", format=format)
    assert (done.merged, done.layers, done.kept) == (4, 14, ("lm_head",))
    expected = logits(adapted)
    assert 0 < distance(logits(load_fp8(tmp_path / "out").eval()), expected) < 0.08
    # the cast of what is merged, as of a model that was trained whole
    whole = adapted.float().merge_and_unload()
    export(whole, tmp_path / "whole", format=format)
    merged, expected_files = files(tmp_path / "out"), files(tmp_path / "whole")
    for name in (name for name in merged if "_proj" in name and not has_adapters(name)):
        assert torch.equal(bits(merged[name]), bits(expected_files[name])), name


def test_what_lies_beside_the_adapters_goes_along_before_what_lies_beside_the_model(base, tmp_path) -> None:
    adapters_on(in_16_bits(base), tmp_path / "adapters")
    for folder, names in ((base, ("tokenizer.json", "vocab.txt")), (tmp_path / "adapters", ("tokenizer.json",))):
        for name in names:
            (folder / name).write_text(json.dumps({"of": folder.name}))
    export(tmp_path / "adapters", tmp_path / "out", format="bf16")
    found = [json.loads((tmp_path / "out" / name).read_text())["of"] for name in ("tokenizer.json", "vocab.txt")]
    assert found == ["adapters", "base"]
    assert not (tmp_path / "out" / ADAPTER_CONFIG).exists()


def test_adapters_on_a_model_in_fp16_are_merged_into_one(tmp_path) -> None:
    model().half().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", torch_dtype=torch.float16, local_files_only=True)
    adapters_on(base, tmp_path / "adapters")
    export(tmp_path / "adapters", tmp_path / "out", format="bf16")
    assert {value.dtype for value in files(tmp_path / "out").values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float16"


def test_one_weight_of_the_model_is_in_memory_at_a_time(base, tmp_path) -> None:
    adapters_on(in_16_bits(base), tmp_path / "adapters")
    source = Merged(tmp_path / "adapters", None, in_fp8=False)
    for name, adapters in source._adapters.items():
        layer = adapters.get_base_layer()
        source.tensor(name)
        assert layer.weight.untyped_storage().nbytes() < 16


@pytest.mark.parametrize("format", FORMATS)
def test_on_a_base_in_fp8_weights_without_adapters_keep_their_bytes(base, tmp_path, format) -> None:
    export(base, tmp_path / "fp8", format=format)
    adapted = adapters_on(load_fp8(tmp_path / "fp8"), tmp_path / "adapters")
    settings = json.loads((tmp_path / "adapters" / ADAPTER_CONFIG).read_text())
    settings["base_model_name_or_path"] = str(tmp_path / "fp8")
    (tmp_path / "adapters" / ADAPTER_CONFIG).write_text(json.dumps(settings))
    export(tmp_path / "adapters", tmp_path / "out", format=format)
    before, after = files(tmp_path / "fp8"), files(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name, value in before.items() if not torch.equal(bits(after[name]), bits(value))}
    assert changed
    assert all(map(has_adapters, changed))
    expected = logits(adapted)
    assert 0 < distance(logits(load_fp8(tmp_path / "out").eval()), expected) < 0.06
    export(tmp_path / "adapters", tmp_path / "bf16", format="bf16")
    assert distance(logits(in_16_bits(tmp_path / "bf16")), expected) < 0.02
    assert {value.dtype for value in files(tmp_path / "bf16").values()} == {torch.bfloat16}
    frozen = load_fp8(tmp_path / "out", frozen=True).eval()
    assert distance(logits(frozen), expected) < 0.08


def test_a_frozen_model_in_memory_is_written_with_the_bytes_it_has(base, tmp_path) -> None:
    frozen = freeze(in_16_bits(base), FP8Config(scaling="rowwise"))
    adapted = adapters_on(frozen, tmp_path / "adapters")
    merged = adapted.merge_and_unload()
    with pytest.raises(ValueError, match="with rowwise scales, and the format has blockwise ones"):
        export(merged, tmp_path / "out")
    done = export(merged, tmp_path / "out", format="compressed-tensors")
    assert done.layers == 14
    state = merged.state_dict()
    for name, value in files(tmp_path / "out").items():
        expected = state[name + "_inv" if name.endswith("_scale") else name]
        assert torch.equal(bits(value), bits(expected)), name
    export(merged, tmp_path / "bf16", format="bf16")
    assert distance(logits(in_16_bits(tmp_path / "bf16")), logits(merged)) < 0.06


@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
def test_adapters_on_gpt2s_layers_and_on_positions_are_merged(tmp_path, dora) -> None:
    tiny_gpt2().bfloat16().save_pretrained(tmp_path / "base")
    on = ["c_attn"] if dora else ["c_attn", "wpe"]  # peft 0.13 itself merges no magnitudes of embeddings
    adapted = adapters_on(in_16_bits(tmp_path / "base"), tmp_path / "adapters", on, use_dora=dora, fan_in_fan_out=True)
    assert export(tmp_path / "adapters", tmp_path / "out", format="bf16").merged == (2 if dora else 3)
    require_merged(tmp_path, adapted)


def test_adapters_on_embeddings_are_merged_with_the_weight_that_the_model_has(base, tmp_path) -> None:
    """With adapters on embeddings peft saves the weight too."""
    adapted = adapters_on(in_16_bits(base), tmp_path / "adapters", ["q_proj", "embed_tokens"])
    assert any(".base_layer." in name for name in files(tmp_path / "adapters"))
    assert export(tmp_path / "adapters", tmp_path / "out", format="bf16").merged == 3
    require_merged(tmp_path, adapted)


def test_an_fp8_folder_is_written_in_16_bits(base, tmp_path) -> None:
    export(base, tmp_path / "fp8")
    export(tmp_path / "fp8", tmp_path / "bf16", format="bf16")
    expected = load_fp8(tmp_path / "fp8").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in in_16_bits(tmp_path / "bf16").state_dict().items())


@pytest.mark.parametrize("layers", ["input_layernorm", "q_proj"])
def test_layers_that_peft_trains_copies_of_are_told(base, tmp_path, layers) -> None:
    config = peft.LNTuningConfig(task_type="CAUSAL_LM", target_modules=[layers])
    peft.get_peft_model(in_16_bits(base), config).save_pretrained(tmp_path / "adapters")
    with pytest.raises(ValueError, match=r"is of LN_TUNING, which trains copies of layers .*merge_and_unload, and exp"):
        export(tmp_path / "adapters", tmp_path / "out")


def test_adapters_that_cannot_be_merged_are_told(base, tmp_path) -> None:
    folder = tmp_path / "adapters"
    adapters_on(in_16_bits(base), folder)
    settings, weights = json.loads((folder / ADAPTER_CONFIG).read_text()), load_file(folder / ADAPTER_FILE)
    first = next(name for name in weights if "lora_A" in name)

    def refused(words: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> None:
        (folder / ADAPTER_CONFIG).write_text(json.dumps({**settings, **changes}))
        save_file(copy.copy(weights) if tensors is None else tensors, folder / ADAPTER_FILE)
        with pytest.raises(ValueError, match=words):
            export(folder, tmp_path / "out", format="bf16")
        assert not (tmp_path / "out").exists()

    refused("names no folder of a model here \\('gone'\\)", base_model_name_or_path="gone")
    refused("names no folder of a model here", base_model_name_or_path=None)
    refused("trains more than adapters", modules_to_save=["lm_head"])
    refused("trains more than adapters", lora_bias=True)
    refused("trains more than adapters", bias="all")
    refused("trains more than adapters", bias="lora_only")
    refused("trains more than adapters", trainable_token_indices=[3])
    refused("trains more than adapters", target_parameters=["mlp.experts.gate_up_proj"])
    refused("init_lora_weights 'pissa_niter_4', by which peft changed the model", init_lora_weights="pissa_niter_4")
    refused("lacks .*lora_A.* and 0 more", {name: value for name, value in weights.items() if name != first})
    refused("is of another model .*; name that as base", {**weights, first: torch.zeros(8, 12)})
    refused("is of another model .*; name that as base", target_modules=["qkv"])
    refused("_proj.weight are not finite", {**weights, first: torch.full_like(weights[first], torch.nan)})
    of_head = {f"base_model.model.lm_head.lora_{part}.weight": torch.ones(sides) for part, sides in HEAD.items()}
    refused("lm_head.weight in .* is not one layer's weight", of_head, **tied(tmp_path))
    with pytest.raises(ValueError, match="leave masters out"):
        export(folder, tmp_path / "out", masters=tmp_path)
    (folder / ADAPTER_FILE).unlink()
    with pytest.raises(ValueError, match=f"holds no {ADAPTER_FILE}"):
        export(folder, tmp_path / "out")


HEAD = {"A": (8, 64), "B": (128, 8)}
"""The sides of adapters on the head of `tiny_llama`."""


def tied(tmp_path: Path) -> dict[str, Any]:
    """Settings of adapters on a head that is the embeddings."""
    torch.manual_seed(0)
    tiny_llama(tie_word_embeddings=True).bfloat16().save_pretrained(tmp_path / "tied")
    return {"base_model_name_or_path": str(tmp_path / "tied"), "target_modules": ["lm_head"]}

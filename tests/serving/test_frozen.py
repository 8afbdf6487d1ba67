"""Models whose frozen weights are in FP8 from the first: from FP8 checkpoints, from 16-bit ones, and at random."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM

from fp8booster import FP8Config, FP8Linear, convert_to_fp8
from fp8booster.config import Formats
from fp8booster.nn import FrozenFP8Linear
from fp8booster.serving import load_fp8, read
from fp8booster.serving.formats import CHECKPOINT_FORMATS
from fp8booster.serving.read import fill, load_frozen, random_frozen
from tests.colossal.models import tiny_llama, token_batch
from tests.serving.folders import export


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in 16 bits."""
    folder = tmp_path_factory.mktemp("model") / "bf16"
    torch.manual_seed(0)
    tiny_llama().bfloat16().save_pretrained(folder, max_shard_size="100KB")
    return folder


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in {*model.parameters(), *model.buffers()})


def frozen_layers(model: nn.Module) -> dict[str, FrozenFP8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FrozenFP8Linear)}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder's one file."""
    return load_file(folder / "model.safetensors")


def change(folder: Path, **tensors: torch.Tensor) -> None:
    """Put tensors in the place of those of a folder's one file, by the ends of their names in the first layer."""
    save_file(stored(folder) | {FIRST + name: value for name, value in tensors.items()}, folder / "model.safetensors")


FIRST = "model.layers.0."


@pytest.mark.parametrize("format", CHECKPOINT_FORMATS)
def test_an_fp8_checkpoint_stays_as_it_is(folder, tmp_path, format) -> None:
    export(folder, tmp_path / "fp8", format=format)
    decoded, kept = load_fp8(tmp_path / "fp8"), load_fp8(tmp_path / "fp8", frozen=True)
    layers = frozen_layers(kept)
    assert len(layers) == 14
    assert {layer.fp8_config.granularity for layer in layers.values()} == {CHECKPOINT_FORMATS[format].granularity}
    saved: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "fp8").glob("*.safetensors"):
        saved |= load_file(file)
    state = kept.state_dict()
    for name in layers:
        assert torch.equal(state[f"{name}.weight"].view(torch.uint8), saved[f"{name}.weight"].view(torch.uint8)), name
    for (name, value), other in zip(decoded.named_modules(), kept.modules(), strict=True):
        if "weight" in value._parameters:
            assert torch.equal(value.weight, other.weight), name
    assert not any(tensor.is_meta for tensor in [*kept.parameters(), *kept.buffers()])
    (batch,) = (token_batch(2, 16),)
    expected = decoded(batch).logits
    assert (kept(batch).logits - expected).norm() < 0.05 * expected.norm()


def test_a_16_bit_checkpoint_is_cast_as_the_whole_model_would_be(folder) -> None:
    kept = load_frozen(folder, FP8Config())
    whole = convert_to_fp8(LlamaForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16), FP8Config())
    before = bytes_of(whole)
    layers = frozen_layers(kept)
    for name, layer in layers.items():
        FrozenFP8Linear.convert_in_place(whole.get_submodule(name), FP8Config())
        assert torch.equal(whole.get_submodule(name).fp8_data, layer.fp8_data), name
    values = sum(layer.fp8_shape[0] * layer.fp8_shape[1] for layer in layers.values())
    assert bytes_of(kept) == bytes_of(whole) == before - values + 4 * len(layers)


def test_a_tied_head_computes_in_fp8_from_the_weight_in_16_bits(tmp_path) -> None:
    model = tiny_llama(tie_word_embeddings=True).bfloat16().eval()
    model.save_pretrained(tmp_path)
    kept = load_frozen(tmp_path, FP8Config(vocabulary_head=True, always=True))
    assert len(frozen_layers(kept)) == 14
    assert type(kept.lm_head) is FP8Linear
    assert kept.lm_head.weight is kept.model.embed_tokens.weight
    expected = model(token_batch(2, 16)).logits
    assert (kept(token_batch(2, 16)).logits - expected).norm() < 0.1 * expected.norm()


def test_random_weights_are_in_fp8_from_the_first(folder, monkeypatch) -> None:
    without_memory: list[int] = []

    def filled(model: nn.Module, *arguments: Any) -> None:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        assert all(parameter.is_meta for parameter in matrices)
        without_memory.append(len(matrices))
        fill(model, *arguments)

    monkeypatch.setattr(read, "fill", filled)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(random_frozen(AutoConfig.from_pretrained(folder), FP8Config(), device=torch.device("cpu")))
    assert without_memory == [16, 16]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name].float(), states[1][name].float()) for name in states[0])
    assert len(frozen_layers(models[0])) == 14
    assert models[0].model.norm.weight.eq(1).all()
    width = models[0].model.layers[1].mlp.up_proj.weight.float().std().item()
    assert width == pytest.approx(models[0].config.initializer_range, rel=0.05)
    batch = token_batch(2, 16)
    assert torch.isfinite(models[0].train()(input_ids=batch, labels=batch).loss)


def test_what_cannot_be_kept_is_told(folder, tmp_path) -> None:
    export(folder, tmp_path / "fp8", format="fine-grained", shard_bytes=2**30)
    file = tmp_path / "fp8" / "config.json"
    record = json.loads(file.read_text())
    record["quantization_config"]["weight_block_size"] = [64, 64]
    file.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"for blocks of \(64, 64\).*load it without frozen"):
        load_fp8(tmp_path / "fp8", frozen=True)


def test_e5m2_is_never_read_as_e4m3(folder, tmp_path) -> None:
    export(folder, tmp_path / "fp8", format="tensorwise")
    name, scale = "mlp.up_proj.weight", "mlp.up_proj.weight_scale_inv"
    values = stored(tmp_path / "fp8")[FIRST + name].float()
    change(tmp_path / "fp8", **{name: values.to(torch.float8_e5m2)})
    with pytest.raises(ValueError, match=r"up_proj\.weight in .* is torch\.float8_e5m2; load it without frozen, which"):
        load_fp8(tmp_path / "fp8", frozen=True)
    with pytest.raises(ValueError, match=r"up_proj\.weight is kept in FP8 alone, with other scales, and the format"):
        export(tmp_path / "fp8", tmp_path / "again", format="tensorwise")
    exact = values.to(torch.float8_e5m2).float() * stored(tmp_path / "fp8")[FIRST + scale]
    export(tmp_path / "fp8", tmp_path / "bf16", format="bf16")
    decoded = load_fp8(tmp_path / "fp8").get_parameter(FIRST + name)
    assert torch.equal(decoded, exact.bfloat16())
    assert torch.equal(stored(tmp_path / "bf16")[FIRST + name], exact.bfloat16())


def test_fp8_codes_without_a_scale_are_refused_whoever_reads_them(folder, tmp_path) -> None:
    export(folder, tmp_path / "fp8")
    change(tmp_path / "fp8", **{"input_layernorm.weight": torch.ones(64).to(torch.float8_e5m2)})
    for reader in (load_fp8, lambda where: load_fp8(where, frozen=True), lambda where: export(where, tmp_path / "out")):
        with pytest.raises(ValueError, match=r"input_layernorm\.weight.* has no scale"):
            reader(tmp_path / "fp8")
    file = tmp_path / "fp8" / "config.json"
    record = json.loads(file.read_text())
    del record["quantization_config"]
    file.write_text(json.dumps(record))
    tensors = {
        name: value for name, value in stored(tmp_path / "fp8").items() if value.dtype is not torch.float8_e4m3fn
    }
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds weights in FP8, and its config\.json has no quantization_config"):
        load_fp8(tmp_path / "fp8")


@pytest.mark.parametrize(("format", "finer"), [("compressed-tensors", True), ("tensorwise", False)])
def test_a_frozen_model_is_what_was_asked_for_but_for_its_granularity(tmp_path, format, finer) -> None:
    """With biases, and scales in 16 bits, as others store them."""
    model = tiny_llama(attention_bias=True).bfloat16()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.bias)
    export(model, tmp_path / "fp8", format=format)
    end = "self_attn.q_proj.weight_scale" + ("" if finer else "_inv")
    scale = stored(tmp_path / "fp8")[FIRST + end].bfloat16()
    change(tmp_path / "fp8", **{end: scale})
    asked = FP8Config(scaling="tensorwise" if finer else "blockwise", always=True, fast_accumulation=())
    kept = load_fp8(tmp_path / "fp8", frozen=True, dtype=torch.float16, fp8_config=asked)
    layer = kept.model.layers[0].self_attn.q_proj
    expected = FP8Config(scaling="rowwise" if finer else "tensorwise", always=True, fast_accumulation=())
    assert {each.fp8_config for each in frozen_layers(kept).values()} == {expected}
    assert torch.equal(layer.bias, model.model.layers[0].self_attn.q_proj.bias.half())
    assert torch.equal(layer.state_dict()["weight_scale_inv"].flatten(), scale.float().flatten())
    assert {layer.weight.dtype, *(value.dtype for value in kept.parameters() if value.is_floating_point())} == {
        torch.float16,
        *({torch.float32} if layer.fp8_inverse_scale.is_floating_point() else set()),
    }


def test_a_configuration_of_the_folders_granularity_is_kept_whole(folder, tmp_path) -> None:
    export(folder, tmp_path / "fp8", format="tensorwise")
    asked = FP8Config(scaling="amax", formats=Formats(gradient=torch.float8_e4m3fn))
    kept = load_fp8(tmp_path / "fp8", frozen=True, fp8_config=asked)
    assert {each.fp8_config for each in frozen_layers(kept).values()} == {asked}


def test_a_tied_weight_is_read_by_any_of_its_names(tmp_path) -> None:
    model = tiny_llama(tie_word_embeddings=True).bfloat16()
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, weights)
    kept = load_frozen(tmp_path, FP8Config())
    assert torch.equal(kept.model.embed_tokens.weight, model.lm_head.weight)
    assert kept.lm_head.weight is kept.model.embed_tokens.weight


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loaded_model_generates_and_evaluates_as_transformers_loads_it(tmp_path, frozen) -> None:
    model = tiny_llama().bfloat16()
    model.generation_config.eos_token_id = [5, 7]
    export(model, tmp_path / "fp8")
    loaded = load_fp8(tmp_path / "fp8", frozen=frozen)
    assert loaded.generation_config.eos_token_id == [5, 7]
    assert not loaded.training
    assert loaded.name_or_path == str(tmp_path / "fp8")
    assert model.generation_config._from_model_config  # it was made from the config, and files keep that
    prompt = torch.tensor([[1, 2, 3]], dtype=torch.int64)
    assert loaded.generate(prompt, max_new_tokens=2, min_new_tokens=2).shape == (1, 5)

"""Models written in FP8, and read again."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPTJConfig,
    GPTJForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from fp8booster import FP8Config, convert_to_fp8, fuse, load_fp8, quantize
from fp8booster import files as files_of_disk
from fp8booster.config import Formats
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.scaling import RealTime
from fp8booster.serving.formats import CHECKPOINT_FORMATS
from fp8booster.serving.layout import layout_of, layout_of_config
from tests.colossal.models import VOCABULARY, tiny_llama, token_batch
from tests.nn.fused.models import build
from tests.nn.models import tiny_gpt2
from tests.serving.folders import bits, equal, export, exported, files

FORMATS = list(CHECKPOINT_FORMATS)
TRANSFORMERS_5 = transformers.__version__.startswith("5.")
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 144,  # no multiple of 128
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
UP = "model.layers.0.mlp.up_proj.weight"


def llama(**options):
    return tiny_llama(**options).bfloat16()


def qwen():
    """With biases of q, k and v, and tied embeddings."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).bfloat16()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.q_proj.bias)
    return model


def phi():
    """With q, k and v, and gate and up, in one layer each."""
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES)).bfloat16()


MODELS = {"llama": llama, "qwen": qwen, "phi": phi}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_model_comes_back_with_the_values_that_were_written(tmp_path, model, format):
    written = MODELS[model]()
    done = export(written, tmp_path / "out", format=format)
    expected, there = written.state_dict(), files(tmp_path / "out")
    scale_name = CHECKPOINT_FORMATS[format].scale_name
    in_fp8 = {name for name, value in there.items() if value.dtype is torch.float8_e4m3fn}
    assert len(in_fp8) == done.layers == {"llama": 14, "qwen": 14, "phi": 8}[model]
    assert done.kept == ("lm_head",)
    again = load_fp8(tmp_path / "out")
    assert {value.dtype for value in again.state_dict().values()} == {torch.bfloat16}
    for name, value in again.state_dict().items():
        if name not in in_fp8:
            assert torch.equal(value, expected[name]), name
            continue
        scale = there[name.removesuffix("weight") + scale_name]
        error = (value.float() - expected[name].float()).abs()
        # half a step of E4M3: 2^-4 of a value, and below its normal range 2^-10 of a scale
        assert (error <= expected[name].float().abs() / 15 + scale.max() * 2**-9).all(), name
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == (model == "qwen")
    assert ("lm_head.weight" in there) == (model != "qwen")


@pytest.mark.parametrize("format", FORMATS)
def test_exported_again_a_loaded_model_has_the_same_weights(tmp_path, format):
    export(qwen(), tmp_path / "first", format=format)
    export(load_fp8(tmp_path / "first"), tmp_path / "again", format=format)
    if not format.endswith("tensorwise"):  # scales are powers of two: BF16 holds what they multiply
        first, again = (load_fp8(tmp_path / name, dtype=torch.float32).state_dict() for name in ("first", "again"))
        assert first.keys() == again.keys()
        assert all(torch.equal(again[name], value) for name, value in first.items())
        return
    first, again = files(tmp_path / "first"), files(tmp_path / "again")
    assert first.keys() == again.keys()
    for name, value in first.items():
        if "scale" in name:
            torch.testing.assert_close(again[name], value, rtol=2**-8, atol=0)
        else:
            assert torch.equal(bits(again[name]), bits(value)), name


@pytest.mark.parametrize("format", ["tensorwise", "compressed-tensors-tensorwise"])
def test_the_bytes_are_those_that_a_fused_model_multiplies_by(tmp_path, format):
    model = llama().train()
    export(model, tmp_path / "plain", format=format)
    convert_to_fp8(model, FP8Config(always=True))
    fuse(model)
    tokens = token_batch(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    export(model, tmp_path / "converted", format=format)
    plain = files(tmp_path / "plain")
    assert equal(plain, files(tmp_path / "converted"))
    names = {id(module): name for name, module in model.named_modules()}
    compared = 0
    for merged in merged_layers(model):
        held = merged.fp8_weight.held  # q, k and v, gate and up under one scale
        made = torch.cat([plain[f"{names[id(layer)]}.weight"] for layer in merged.layers])
        assert torch.equal(bits(held.data[: len(made)]), bits(made))
        for layer in merged.layers:
            scale = plain[f"{names[id(layer)]}.{CHECKPOINT_FORMATS[format].scale_name}"]
            assert scale == held.inverse_scale
        compared += 1
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Layer) and layer.fp8_weight.held is not None:
            assert torch.equal(bits(layer.fp8_weight.held.data), bits(plain[f"{name}.weight"]))
            compared += 1
    assert compared == 8


@pytest.mark.parametrize(("granularity", "format"), [("blockwise", "fine-grained"), ("rowwise", "compressed-tensors")])
def test_finer_scales_are_those_of_training(tmp_path, granularity, format):
    model = llama(hidden_size=128, intermediate_size=256, head_dim=64).train()
    convert_to_fp8(model, FP8Config(scaling=RealTime(granularity, power_of_two=False), always=True))
    tokens = token_batch(0)
    model(input_ids=tokens, labels=tokens).loss.backward()
    export(model, tmp_path / "out", format=format)
    there = files(tmp_path / "out")
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Layer):
            held = layer.fp8_weight.held
            assert torch.equal(bits(held.data), bits(there[f"{name}.weight"]))
            scale = there[f"{name}.{CHECKPOINT_FORMATS[format].scale_name}"]
            assert torch.equal(scale.flatten(), held.inverse_scale.view(len(scale), -1)[:, : scale.shape[1]].flatten())


def without_k(name, module):
    return isinstance(module, torch.nn.Linear) and name.endswith("_proj") and "k_proj" not in name


@pytest.mark.parametrize(
    ("config", "together"),
    [
        (FP8Config(), [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]),
        (FP8Config(fused=False), []),
        (FP8Config(layers=without_k), [("gate_proj", "up_proj")]),
    ],
    ids=["fused", "apart", "k in 16 bits"],
)
def test_weights_share_a_scale_where_training_multiplies_them_as_one(tmp_path, config, together):
    model = llama()
    state = model.state_dict()
    for out in exported(model, tmp_path, format="tensorwise", config=config):
        there = files(out)
        weights = [name for name, value in there.items() if value.dtype is torch.float8_e4m3fn]
        assert len(weights) == (12 if config.layers is without_k else 14)
        for name in weights:
            path, end, _ = name.rsplit(".", 2)
            mates = next((each for each in together if end in each), (end,))
            amax = max(state[f"{path}.{each}.weight"].float().abs().max() for each in mates)
            torch.testing.assert_close(there[f"{name}_scale_inv"], amax / 448, msg=name)


@pytest.mark.parametrize("model", MODELS)
def test_a_folder_gives_the_same_files_as_its_model(tmp_path, model):
    written = MODELS[model]()
    written.save_pretrained(tmp_path / "model", max_shard_size="50KB")
    for name in (beside := ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja")):
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_text("{}")
    live = export(written, tmp_path / "live", shard_bytes=40_000)
    stored = export(str(tmp_path / "model"), tmp_path / "stored")
    assert (live.layers, live.kept, live.bytes) == (stored.layers, stored.kept, stored.bytes)
    assert equal(files(tmp_path / "stored"), files(tmp_path / "live"))
    for name in (*beside, "generation_config.json"):
        assert (tmp_path / "stored" / name).is_file(), name
    assert [file.name for file in (tmp_path / "stored").glob("*.safetensors")] == ["model.safetensors"]


def test_no_index_of_the_model_that_is_read_goes_along(tmp_path):
    export(llama(), tmp_path / "many", format="bf16", shard_bytes=20_000)
    export(tmp_path / "many", tmp_path / "one")
    assert not list((tmp_path / "one").glob("*.index.json"))


def test_layers_that_do_not_run_as_one_share_no_scale(tmp_path):
    model = convert_to_fp8(llama())
    fuse(model)
    layers = "model.layers.0.self_attn", "model.layers.1.self_attn"
    together = [tuple(f"{path}.{name}_proj.weight" for name in "qkv") for path in layers]
    assert [layout_of(model).groups[names[1]] for names in together] == together
    model.get_submodule(f"{layers[0]}.q_proj").register_forward_hook(lambda *_: None)
    groups = layout_of(model).groups
    assert [groups[name] for name in together[0]] == [(name,) for name in together[0]]
    assert groups[together[1][1]] == together[1]


@pytest.mark.parametrize("model", MODELS)
def test_tensors_are_those_that_transformers_fp8_layers_have(tmp_path, model):
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear
    from transformers.utils.quantization_config import FineGrainedFP8Config

    written = MODELS[model]()
    export(written, tmp_path / "out")
    settings = AutoConfig.from_pretrained(tmp_path / "out").quantization_config
    kept = settings["modules_to_not_convert"]
    replaced = replace_with_fp8_linear(
        written, modules_to_not_convert=list(kept), quantization_config=FineGrainedFP8Config(**settings)
    )
    there = files(tmp_path / "out")
    expected = {
        name: value for name, value in replaced.state_dict().items() if name in there or name != "lm_head.weight"
    }
    assert {name: value.shape for name, value in expected.items()} == {
        name: value.shape for name, value in there.items()
    }
    for name, value in there.items():
        if "scale" in name or value.dtype is torch.float8_e4m3fn:
            assert expected[name].dtype is value.dtype, name


@pytest.mark.skipif(not TRANSFORMERS_5, reason="transformers 4 loads FP8 on a GPU alone")
@pytest.mark.parametrize("format", ["fine-grained", "tensorwise"])
def test_transformers_dequantizes_to_the_same_model(tmp_path, format):
    model = llama(hidden_size=256, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2)
    export(model, tmp_path / "out", format=format)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    ours = load_fp8(tmp_path / "out")
    for name, value in theirs.state_dict().items():
        assert torch.equal(value, ours.state_dict()[name]), name
    tokens = token_batch(0)
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, ours(tokens).logits)
        exact = model(tokens).logits
    assert 0 < (ours(tokens).logits - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize(
    ("format", "strategy", "shape"),
    [("compressed-tensors", "channel", (128, 1)), ("compressed-tensors-tensorwise", "tensor", (1,))],
)
def test_the_config_says_how_compressed_tensors_are_multiplied(tmp_path, format, strategy, shape):
    export(llama(), tmp_path / "out", format=format)
    assert files(tmp_path / "out")[f"{UP}_scale"].shape == shape  # as compressed-tensors 0.20 reads it
    settings = config_of(tmp_path / "out")["quantization_config"]
    group = settings["config_groups"]["group_0"]
    assert settings["format"] == "float-quantized"
    assert settings["ignore"] == ["lm_head"]
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    assert group["weights"] == {**fp8, "strategy": strategy, "dynamic": False}
    assert group["input_activations"] == {**fp8, "strategy": "token", "dynamic": True}
    assert group["targets"] == ["Linear"]


@pytest.mark.parametrize(("format", "block"), [("fine-grained", [128, 128]), ("tensorwise", None)])
def test_the_config_says_how_fine_grained_weights_are_scaled(tmp_path, format, block):
    export(llama(), tmp_path / "out", format=format)
    assert config_of(tmp_path / "out")["quantization_config"] == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }


def test_gpt2_in_fp8_is_written_in_16_bits_as_its_weights_lie(tmp_path):
    model = tiny_gpt2().bfloat16()
    expected = model.state_dict()
    export(quantize(model), tmp_path / "out", format="bf16")
    for name, value in files(tmp_path / "out").items():
        assert value.shape == expected[name].shape, name
        assert (value - expected[name]).norm() <= 0.04 * expected[name].norm(), name


def test_a_model_without_torch_s_attention_is_written_and_read(tmp_path):
    torch.manual_seed(0)
    model = GPTJForCausalLM(GPTJConfig(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)).bfloat16()
    model.eval()
    model.save_pretrained(tmp_path / "model")
    assert export(model, tmp_path / "live").layers == export(tmp_path / "model", tmp_path / "stored").layers == 12
    with torch.no_grad():
        expected = model(token_batch(0)).logits
        for frozen in (False, True):
            found = load_fp8(tmp_path / "stored", frozen=frozen).eval()(token_batch(0)).logits
            assert 0 < (found - expected).norm() < 0.1 * expected.norm()


def test_a_model_that_is_no_causal_one_is_refused(tmp_path):
    config = T5Config(vocab_size=VOCABULARY, d_model=64, d_ff=128, num_layers=1, num_heads=4)
    model = T5ForConditionalGeneration(config).bfloat16()
    model.save_pretrained(tmp_path / "model")
    for source in (model, tmp_path / "model"):
        with pytest.raises(ValueError, match="no causal language model of the type 't5'; give one that it has"):
            export(source, tmp_path / "out")


def test_a_tied_weight_is_in_16_bits_under_its_first_name(tmp_path):
    model = llama(tie_word_embeddings=True)
    done = export(model, tmp_path / "live", config=FP8Config(vocabulary_head=True))
    assert (done.layers, done.kept) == (14, ("lm_head",))
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file)
    export(tmp_path / "model", tmp_path / "stored")
    for out in ("live", "stored"):
        there = files(tmp_path / out)
        assert "lm_head.weight" not in there
        assert torch.equal(there["model.embed_tokens.weight"], model.lm_head.weight)


def test_the_configs_are_those_of_a_model_that_is_served(tmp_path):
    """They name its class, and let it keep keys and values, also where training never did."""
    model = llama()
    model.config.use_cache = model.generation_config.use_cache = False
    assert model.config.architectures is None
    export(model, tmp_path / "live", format="bf16")
    model.save_pretrained(tmp_path / "model")
    record = config_of(tmp_path / "model")
    for kind, out in ((None, "stored"), (["FSDPLlamaForCausalLM"], "sharded"), (["OwnLlama"], "own")):
        (tmp_path / "model" / "config.json").write_text(json.dumps(record | {"architectures": kind}))
        export(tmp_path / "model", tmp_path / out)
    for out in ("live", "stored", "sharded", "own"):
        assert config_of(tmp_path / out)["architectures"] == ["OwnLlama" if out == "own" else "LlamaForCausalLM"]
        assert config_of(tmp_path / out)["use_cache"] is True
        assert config_of(tmp_path / out)["torch_dtype"] == "bfloat16"
        assert GenerationConfig.from_pretrained(tmp_path / out).use_cache is True


def test_what_is_of_this_process_is_in_no_config(tmp_path):
    """A model that was read here has chosen its attention; who reads what is written of it chooses again."""
    llama().save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", torch_dtype=torch.bfloat16)
    assert model.config._attn_implementation == "sdpa"
    export(model, tmp_path / "out", format="bf16")
    assert not {"_name_or_path", "_attn_implementation_autoset"} & config_of(tmp_path / "out").keys()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", torch_dtype=torch.bfloat16)
    assert again.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [llama, tiny_gpt2])
def test_weights_kept_in_fp8_are_written_in_the_16_bits_of_the_model(tmp_path, make, kind):
    model = quantize(make().to(kind))
    out = export(model, tmp_path / "out", format="bf16").folder
    assert {value.dtype for value in files(out).values()} == {kind}
    again = AutoModelForCausalLM.from_pretrained(out, torch_dtype=kind)
    for name, module in model.named_modules():
        if isinstance(module, FrozenLayer):
            assert torch.equal(again.get_submodule(name).weight, module.weight), name


@pytest.mark.parametrize(("head", "written"), [("float16", "float16"), ("bfloat16", "bfloat16")])
@pytest.mark.parametrize("format", ["fine-grained", "bf16"])
def test_a_model_in_fp16_alone_stays_in_it(tmp_path, format, head, written):
    model = llama().half()
    model.model.layers[0].input_layernorm.float()
    model.lm_head.to(getattr(torch, head))
    for out in exported(model, tmp_path, format=format):
        assert config_of(out)["torch_dtype"] == written
        there = files(out)
        assert torch.equal(there["lm_head.weight"], model.lm_head.weight)
        assert there["model.norm.weight"].dtype is torch.float16
        assert there["model.layers.0.input_layernorm.weight"].dtype is getattr(torch, written)


def test_buffers_keep_the_type_that_the_model_gives_them(tmp_path):
    """As a router's bias for the choice of experts, which BF16 would round."""
    model = build("deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).data = torch.linspace(0.1, 0.4, 4)
    for out in exported(model, tmp_path):
        there = files(out)
        assert torch.equal(there[bias], torch.linspace(0.1, 0.4, 4))
        assert there["model.norm.weight"].dtype is torch.bfloat16


def test_layers_that_train_in_16_bits_are_exported_so(tmp_path):
    config = FP8Config(high_precision_ends=1)
    done = export(llama(num_hidden_layers=3), tmp_path / "out", config=config)
    assert done.layers == 7
    assert len(done.kept) == 15
    assert files(tmp_path / "out")[UP].dtype is torch.bfloat16


def test_weights_that_layers_cast_in_training_are_told_from_those_that_engines_cast():
    down = {f"model.layers.{number}.mlp.down_proj.weight" for number in range(2)}
    config = tiny_llama().config
    assert layout_of_config(config, FP8Config()).cast_by_layers == set()
    assert layout_of_config(config, FP8Config(scaling="smooth-swiglu")).cast_by_layers == down
    assert len(layout_of_config(config, FP8Config(scaling="rowwise")).cast_by_layers) == 14
    assert len(layout_of_config(phi().config, FP8Config()).cast_by_layers) == 2  # down reads 200, no multiple of 16
    config.vocab_size = 100  # which the head makes
    assert layout_of_config(config, FP8Config(vocabulary_head=True)).cast_by_layers == {"lm_head.weight"}


@pytest.mark.parametrize("format", FORMATS)
def test_scales_that_others_made_are_written_in_the_form_of_the_format(tmp_path, format):
    """In 16 bits, and without the dimensions of size one; scales of what weights are multiplied by are left out."""
    export(llama(), tmp_path / "first", format=format, config=FP8Config(vocabulary_head=True))
    file, end = tmp_path / "first" / "model.safetensors", CHECKPOINT_FORMATS[format].scale_name
    tensors, shapes = load_file(file), {}
    for name, value in tensors.items():
        if name.endswith(end):
            shapes[name] = value.shape
            tensors[name] = value.bfloat16() if format == "fine-grained" else value.bfloat16().flatten()
    unused = ("input_scale", "activation_scale", "k_scale", "v_scale")
    save_file(tensors | {f"model.layers.0.self_attn.k_proj.{name}": torch.ones(()) for name in unused}, file)
    done = export(tmp_path / "first", tmp_path / "again", format=format)
    assert (done.layers, done.kept) == (15, ())
    again = files(tmp_path / "again")
    assert again.keys() == tensors.keys() == load_fp8(tmp_path / "first").state_dict().keys() | shapes.keys()
    for name, value in again.items():
        assert torch.equal(bits(value).flatten(), bits(tensors[name].to(value.dtype)).flatten()), name
    assert {name: again[name].shape for name in shapes} == shapes
    assert {again[name].dtype for name in shapes} == {torch.float32}


def test_a_tensor_of_a_folder_in_16_bits_is_no_scale_whatever_its_name(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.k_scale": torch.ones(())}, file)
    with pytest.raises(
        ValueError, match=r"holds .*self_attn\.k_scale, which the model of its config\.json does not have"
    ):
        export(tmp_path / "model", tmp_path / "out")


def test_scales_that_others_made_are_read(tmp_path):
    """Blocks of another size, one scale a row without a second dimension, one for all; and scales of inputs."""
    export(llama(), tmp_path / "out")
    file, config = tmp_path / "out" / "model.safetensors", tmp_path / "out" / "config.json"
    tensors = load_file(file)
    name = UP.removesuffix("weight")
    record = json.loads(config.read_text())
    record["quantization_config"]["weight_block_size"] = [32, 32]  # the other weights have one scale each
    config.write_text(json.dumps(record))
    for scale in (torch.full((4, 2), 0.5), torch.full((128,), 0.5), torch.full((1,), 0.5)):
        scales = {name + "weight_scale_inv": scale, name + "input_scale": torch.ones(())}
        save_file(tensors | scales, file)
        read = load_fp8(tmp_path / "out", dtype=torch.float32)
        assert torch.equal(read.get_parameter(UP), tensors[UP].float() / 2)


def test_a_disk_that_takes_no_more_is_an_error_of_the_system_and_leaves_nothing(tmp_path):
    """By an error of safetensors' own."""
    model, out = llama(), tmp_path / "new" / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"The model was not written .*File too large.*; make room"):
            export(model, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(out.parent.iterdir())


def test_what_cannot_be_exported_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    model = llama()
    out = tmp_path / "out"
    for arguments, words in (
        ({"format": "gguf"}, "no format 'gguf'"),
        ({"config": FP8Config(formats=Formats(weight=torch.float8_e5m2, gradient=torch.float8_e4m3fn))}, "e5m2"),
        ({"masters": tmp_path}, "masters go with"),
    ):
        with pytest.raises(ValueError, match=words):
            export(model, out, **arguments)
    with pytest.raises(TypeError, match="no model of transformers"):
        export(torch.nn.Linear(16, 16), out)
    for value, format in ((torch.inf, "fine-grained"), (torch.nan, "compressed-tensors"), (torch.nan, "tensorwise")):
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight[0, 0] = value
        with pytest.raises(ValueError, match="not finite"):
            export(model, out, format=format)

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(files_of_disk, "sync_folder", full)
    with pytest.raises(OSError, match="no space"):
        export(llama(), out)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_beside_the_one_that_is_written_is_left_alone(tmp_path):
    (own := tmp_path / ".keep.partial").mkdir()
    (own / "own").write_text("kept")
    export(llama(), tmp_path / "keep")
    assert (own / "own").read_text() == "kept"


def test_a_model_in_memory_of_damaged_values_is_not_exported(tmp_path):
    model = quantize(llama())
    layer = model.get_submodule(UP.removesuffix(".weight"))
    before = layer.fp8_data[3, 4].clone()
    layer.fp8_data[3, 4] = 0x7F  # NaN
    for format in ("tensorwise", "bf16"):
        with pytest.raises(ValueError, match=f"{UP} .*not finite"):
            export(model, tmp_path / "out", format=format)
    layer.fp8_data[3, 4] = before
    for value, words in (
        (torch.ones(64, dtype=torch.int32), "is torch.int32"),
        (torch.full((64,), torch.nan), "finite"),
    ):
        model.model.norm.weight = torch.nn.Parameter(value, requires_grad=False)
        with pytest.raises(ValueError, match=rf"model\.norm\.weight .*{words}"):
            export(model, tmp_path / "out", format="tensorwise")
    assert list(tmp_path.iterdir()) == []


def test_values_in_64_bits_are_written_as_those_in_32(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    expected = files(export(tmp_path / "model", tmp_path / "from_16").folder)
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: value.double() for name, value in load_file(file).items()}, file)
    assert equal(files(export(tmp_path / "model", tmp_path / "from_64").folder), expected)


def test_folders_that_cannot_be_exported_are_named(tmp_path):
    model = llama()
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="there already"):
        export(model, tmp_path / "model")
    export(tmp_path / "model", tmp_path / "fp8")
    with pytest.raises(ValueError, match="with blockwise scales, and the format has rowwise ones; use the format that"):
        export(tmp_path / "fp8", tmp_path / "out", format="compressed-tensors")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        export(tmp_path / "model", tmp_path / "out")
    file.unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        export(tmp_path / "model", tmp_path / "out")


def test_folders_that_cannot_be_loaded_are_named(tmp_path):
    llama().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="no quantization_config"):
        load_fp8(tmp_path / "model")
    model = quantize(llama())
    model.config.save_pretrained(tmp_path / "quantized")
    save_model(model, str(tmp_path / "quantized" / "model.safetensors"))
    with pytest.raises(ValueError, match=r"holds weights in FP8, .*; write the model with fp8booster\.export in place"):
        load_fp8(tmp_path / "quantized")

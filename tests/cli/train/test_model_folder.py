from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from fp8booster import FP8Config
from fp8booster.cli.train import model_folder
from fp8booster.cli.train.checkpoints import _save_config
from fp8booster.cli.train.model_folder import (
    build_model,
    folder_config,
    is_folder,
    load_config,
    require_buildable,
    require_model,
    require_shareable,
)
from fp8booster.nn.quantize import freeze
from fp8booster.training.models import MODELS
from fp8booster.training.parallel import Parallel
from tests.colossal.models import tiny_llama
from tests.colossal.payload import Payload


@pytest.mark.parametrize(
    ("name", "billions"),
    # Touvron et al. 2023, arXiv 2307.09288, and the counts of the published checkpoints
    [
        ("tiny", 0.00526),
        ("100m", 0.12),
        ("1b", 1.1),
        ("7b", 6.738),
        ("13b", 13.016),
        ("30b", 32.529),
        ("qwen2.5-7b", 7.616),
        ("70b", 68.977),
    ],
)
def test_sizes(name, billions):
    config = load_config(name, MODELS[name].vocabulary, 512)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_equal_seeds_give_equal_weights_in_bf16():
    config = load_config("tiny", 300, 64)
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(build_model("tiny", config, torch.device("cpu"), checkpointing=False).state_dict())
    for name, weight in states[0].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, states[1][name])


def test_a_frozen_size_holds_the_casts_of_what_bf16_begins_with(monkeypatch):
    monkeypatch.setattr(model_folder, "build", None)  # which would make it whole in 16 bits
    config = load_config("tiny", 300, 64)
    models = []
    for frozen in (FP8Config(), None):
        torch.manual_seed(7)
        model = build_model("tiny", config, torch.device("cpu"), checkpointing=True, frozen=frozen, one_by_one=True)
        assert model.training
        assert model.is_gradient_checkpointing
        models.append(model)
    in_fp8, in_bf16 = models
    freeze(in_bf16, FP8Config())
    states = [model.state_dict() for model in (in_fp8, in_bf16)]
    assert sum(weight.dtype == torch.float8_e4m3fn for weight in states[0].values()) == 28
    for name, weight in states[0].items():
        assert torch.equal(weight.float(), states[1][name].float())


def test_what_does_not_fit_is_told(tmp_path):
    with pytest.raises(ValueError, match="no model '3b': --model takes one of tiny, 100m"):
        is_folder("3b")
    with pytest.raises(ValueError, match=r"has no config\.json"):
        is_folder(str(tmp_path))
    load_config("tiny", 300, 64).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer has 5000 tokens and the model"):
        load_config(str(tmp_path), 5000, 64)
    with pytest.raises(ValueError, match="--sequence is 9999"):
        load_config(str(tmp_path), 300, 9999)


def test_a_config_that_is_no_causal_language_model_is_told(tmp_path):
    from transformers import T5Config

    for text in ("{nope", "{}"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is not .* model_type") as told:
            load_config(str(tmp_path), 300, 64)
        assert len(str(told.value)) < 300
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ValueError, match=rf"no-such-model, which transformers {version('transformers')} does not know"):
        load_config(str(tmp_path), 300, 64)
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is of the type t5; give a causal language model"):
        load_config(str(tmp_path), 300, 64)


def test_a_model_that_does_not_predict_the_next_token_is_told(tmp_path):
    from transformers import BertConfig, Gemma3Config, ReformerConfig, RobertaConfig, ViTConfig, XLNetConfig

    folder = str(tmp_path)
    for encoder in (BertConfig, RobertaConfig, ReformerConfig):
        encoder().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r'an encoder: .* Set "is_decoder": true in its config\.json'):
            load_config(folder, 300, 64)
    for other in (ViTConfig, Gemma3Config, XLNetConfig):
        other().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=f"is of the type {other.model_type}; give a causal language model"):
            load_config(folder, 300, 64)


@pytest.mark.parametrize("name", ["BertConfig", "GPT2Config", "LlamaConfig"])
def test_an_accepted_model_sees_no_later_token(tmp_path, name):
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    decoder = {"is_decoder": True} if name == "BertConfig" else {}
    getattr(transformers, name)(**sizes, **decoder).save_pretrained(tmp_path)
    folder = str(tmp_path)
    config = load_config(folder, 64, 8)
    model = build_model(folder, config, torch.device("cpu"), checkpointing=False, dtype=torch.float32).eval()
    tokens = torch.arange(8)[None]
    other = tokens.clone()
    other[0, -1] = 63
    with torch.no_grad():
        before, after = (model(input_ids=ids).logits[0] for ids in (tokens, other))
    torch.testing.assert_close(before[:-1], after[:-1])
    assert not torch.allclose(before[-1], after[-1])


def test_heads_that_ranks_cannot_divide_are_told():
    config = load_config("1b", 32000, 64)
    require_shareable(config, Parallel(plugin="hybrid", tp=4, sp=8, sp_mode="ring_attn"))
    for flag, sizes in (("--tp", {"tp": 8}), ("--sp", {"sp": 8, "sp_mode": "all_to_all"})):
        with pytest.raises(ValueError, match=f"has 4 key value heads, which {flag} 8 cannot divide; give another"):
            require_shareable(config, Parallel(plugin="hybrid", **sizes))


def folder_with(folder: Path, **changes: object) -> str:
    """A LLaMA's config with some fields set anew."""
    tiny_llama().config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.pop("head_dim", None)
    (folder / "config.json").write_text(json.dumps(values | changes))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, r"num_attention_heads in .*config\.json is 0; it must be a whole"),
        ({"num_attention_heads": 7}, r"hidden_size in .* is 64, which its 7 num_attention_heads do not divide"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "is 4, no multiple of its 3 num_key_value_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers in .* is 0; it must be a whole number of at least 1"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers in .* is 'two'; it must be"),
        ({"head_dim": 15}, "head_dim in .* is 15; rotary embeddings need an even one"),
    ],
    ids=str,
)
def test_a_config_that_no_model_can_be_built_from_is_told_before_ranks_start(tmp_path, changes, says):
    with pytest.raises(ValueError, match=says) as caught:
        require_buildable(folder_with(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 20}, {"num_attention_heads": 4, "num_key_value_heads": 2}])
def test_a_config_that_a_model_can_be_built_from_is_taken(tmp_path, changes):
    for model, layers in ((folder_with(tmp_path, **changes), 2), ("tiny", 4)):
        for count in (None, layers):
            require_model(model, count)
        with pytest.raises(ValueError, match=f"--checkpointed-layers is 9, and the model has {layers};"):
            require_model(model, 9)


@pytest.mark.parametrize("text", ["null", "[]", "{", "", '{"model_type": 3}'])
def test_a_config_that_is_none_is_told(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json .*save it with save_pretrained"):
        require_buildable(str(tmp_path))


def test_code_that_comes_with_a_model_is_not_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    classes = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (tmp_path / "own.py").write_text("raise SystemExit('it ran')")
    folder = folder_with(tmp_path, auto_map=classes, model_type="own")
    with pytest.raises(ValueError, match=r"names code of its own \(auto_map\), which fp8booster does not run"):
        require_buildable(folder)
    # of a type that transformers has: its own code is taken
    folder = folder_with(tmp_path, auto_map=classes)
    require_buildable(folder)
    model = build_model(folder, load_config(folder, 64, 32), torch.device("cpu"), checkpointing=False)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"


def test_code_among_weights_does_not_run_and_is_not_recommended(tmp_path):
    folder = folder_with(tmp_path)
    torch.save({"lm_head.weight": Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin asks for posix\.mkdir.* do not trust") as caught:
        build_model(folder, load_config(folder, 64, 32), torch.device("cpu"), checkpointing=False)
    assert "weights_only" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_run_in_place_of_its_model_is_told_with_the_model(tmp_path):
    for precision, step in (("bf16", 8), ("fp8", 4), ("fp8", 2)):
        model = tmp_path / precision / "checkpoints" / f"step-{step:08}" / "model"
        model.mkdir(parents=True)
        (model / "config.json").write_text("{}")
    checkpoint = tmp_path / "fp8" / "checkpoints" / "step-00000004"
    for folder in (tmp_path, checkpoint):
        with pytest.raises(ValueError, match=re.escape(f"has no config.json; give {checkpoint / 'model'}, which has.")):
            is_folder(str(folder))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in .*config.json is 1000000000, and no model has more than"),
        ({"hidden_size": 10**12}, "hidden_size in .* is 1000000000000, and no model has more than"),
        ({"n_layer": 10**10}, "n_layer in .* is 10000000000, and no model has"),
        ({"vocab_size": 10**400}, "vocab_size in .* is a number of more than 64 bits, and no model"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers in"),
        ({"num_local_experts": 10**7}, "num_local_experts in .* is 10000000, and no model"),
        ({"num_local_experts": 2**13, "num_hidden_layers": 64}, "asks for 8192 experts in 64 layers, more than any"),
    ],
)
def test_sizes_beyond_any_model_are_told_before_anything_is_made(tmp_path, changes, says):
    record = tiny_llama().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**record, **changes}))
    with pytest.raises(ValueError, match=says):
        folder_config(str(tmp_path))


def test_the_largest_models_are_no_mistake(tmp_path):
    largest = {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 262400}
    for more in ({}, {"num_hidden_layers": 61, "n_routed_experts": 384}, {"max_position_embeddings": 10485760}):
        model_folder._require_sizes({**largest, **more}, tmp_path / "config.json")


def test_experts_are_read_by_the_name_that_transformers_5_writes(tmp_path):
    from transformers import Qwen3MoeConfig

    record = Qwen3MoeConfig(num_experts=8, num_hidden_layers=2, hidden_size=64).to_dict()
    experts = record.pop("num_experts", None) or record.pop("num_local_experts")
    for name in ("num_local_experts", "num_experts"):
        (tmp_path / "config.json").write_text(json.dumps({**record, name: experts}))
        assert folder_config(str(tmp_path)).num_experts == 8
    _save_config(folder_config(str(tmp_path)), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["num_experts"] == 8


@pytest.mark.parametrize("size", [{"tp": 2}, {"pp": 2, "micro_batches": 2}, {"sp": 2, "sp_mode": "all_to_all"}])
def test_models_that_ranks_cannot_divide_are_told(size: dict):
    from transformers import GPTNeoXConfig, LlamaConfig, Qwen3MoeConfig

    small = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    (flag, ranks), *_ = size.items()
    require_shareable(LlamaConfig(**small, num_key_value_heads=4), Parallel(plugin="hybrid", **size))
    with pytest.raises(ValueError, match=f"divide a GPTNeoXForCausalLM among ranks; leave --{flag} {ranks} out"):
        require_shareable(GPTNeoXConfig(**small), Parallel(plugin="hybrid", **size))
    mixture = Qwen3MoeConfig(**small, num_key_value_heads=4, num_experts=4)
    require_shareable(mixture, Parallel(plugin="moe", ep=2))
    with pytest.raises(ValueError, match=f"experts alone .* leave --{flag} {ranks} out"):
        require_shareable(mixture, Parallel(plugin="moe", **size))


def test_experts_that_ranks_cannot_divide_are_told():
    from transformers import LlamaConfig, MixtralConfig, Qwen3MoeConfig

    for config in (MixtralConfig(num_local_experts=8), Qwen3MoeConfig(num_experts=8)):
        require_shareable(config, Parallel(plugin="moe", ep=4))
        with pytest.raises(ValueError, match="has 8 experts, which --ep 3 cannot divide"):
            require_shareable(config, Parallel(plugin="moe", ep=3))
    require_shareable(LlamaConfig(), Parallel(plugin="moe"))
    with pytest.raises(ValueError, match="has no experts, which --ep 2 would spread; leave --ep out"):
        require_shareable(LlamaConfig(), Parallel(plugin="moe", ep=2))

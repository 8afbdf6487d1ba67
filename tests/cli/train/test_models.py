from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8booster.cli.train.models import SIZES, build_model, is_folder, load_config, require_divisible_heads


@pytest.mark.parametrize(
    ("name", "billions"),
    # Touvron et al. 2023, arXiv 2307.09288, and the counts of the published checkpoints
    [("tiny", 0.00526), ("100m", 0.12), ("1b", 1.1), ("7b", 6.738), ("13b", 13.016), ("70b", 68.977)],
)
def test_sizes(name, billions):
    config = load_config(name, SIZES[name].vocabulary, 512)
    with torch.device("meta"):
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(
        billions, rel=0.01
    )


def test_equal_seeds_give_equal_weights_in_bf16():
    config = load_config("tiny", 300, 64)
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        states.append(build_model("tiny", config, torch.device("cpu"), checkpointing=False).state_dict())
    for name, weight in states[0].items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, states[1][name])


def test_a_folder_with_weights_keeps_them(tmp_path):
    config = load_config("tiny", 300, 64)
    model = build_model("tiny", config, torch.device("cpu"), checkpointing=True)
    assert model.is_gradient_checkpointing
    model.save_pretrained(tmp_path)
    again = build_model(
        str(tmp_path), load_config(str(tmp_path), 300, 64), torch.device("cpu"), checkpointing=False
    )
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])


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

    for text in ("{nope", "{}", json.dumps({"model_type": "no-such-model"})):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=r"config\.json is not a config that transformers knows") as told:
            load_config(str(tmp_path), 300, 64)
        assert len(str(told.value)) < 300
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
        with pytest.raises(
            ValueError, match=f"is of the type {other.model_type}; give a causal language model"
        ):
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


def test_weights_that_cannot_be_loaded_are_told(tmp_path):
    config = load_config("tiny", 300, 64)
    build_model("tiny", config, torch.device("cpu"), checkpointing=False).save_pretrained(tmp_path)

    def build():
        folder = str(tmp_path)
        return build_model(folder, load_config(folder, 300, 64), torch.device("cpu"), checkpointing=False)

    config.intermediate_size = 512
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"do not fit its config\.json \(size mismatch"):
        build()
    weights = Path(tmp_path, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"The weights in .* cannot be read"):
        build()


def test_heads_that_ranks_cannot_divide_are_told():
    require_divisible_heads(load_config("1b", 32000, 64), 4, "--tp")
    with pytest.raises(
        ValueError, match="has 4 key value heads, which --tp 8 cannot divide; give another --tp"
    ):
        require_divisible_heads(load_config("1b", 32000, 64), 8, "--tp")

"""Shapes that vLLM and SGLang refuse, found before they load them."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Phi3Config, Phi3ForCausalLM

from fp8booster import FP8Config, convert_to_fp8, export
from fp8booster.serving import tensors
from tests.colossal.models import tiny_llama
from tests.nn.fused.models import build

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
"""With heads of 64 values: keys have 128."""


def llama(**sizes):
    return tiny_llama(**SIZES | sizes).bfloat16()


def phi(**sizes):
    return Phi3ForCausalLM(Phi3Config(**SIZES | {"vocab_size": 128, "num_hidden_layers": 1, "pad_token_id": 0} | sizes))


@pytest.mark.parametrize(
    ("make", "sizes", "ranks", "fault"),
    [
        (llama, {}, 1, None),
        (llama, {"hidden_size": 192}, 1, r"q_proj\.weight is \[192, 192\] in a part of 192 output"),
        (llama, {"num_key_value_heads": 1}, 1, r"k_proj\.weight is \[64, 256\] in a part of 64 output"),
        (llama, {"intermediate_size": 576}, 1, r"gate_proj\.weight is \[576, 256\] in a part of 576 output"),
        (llama, {}, 2, r"k_proj\.weight is \[128, 256\], of which each of 2 ranks has 64 output"),
        (llama, {"head_dim": 128}, 2, None),
        # each rank has a head of keys of its own, though there are two only
        (llama, {"head_dim": 128}, 4, None),
        (llama, {"head_dim": 128}, 8, r"q_proj\.weight is \[512, 256\], of which each of 8 ranks has 64 output"),
        (
            llama,
            {"head_dim": 128, "intermediate_size": 384},
            2,
            r"gate_proj\.weight .*, of which each of 2 ranks has 192",
        ),
        (phi, {}, 1, None),
        (phi, {"hidden_size": 192}, 1, r"qkv_proj\.weight is \[384, 192\] in a part of 192 output"),
        (phi, {"intermediate_size": 576}, 1, r"gate_up_proj\.weight is \[1152, 256\] in a part of 576 output"),
    ],
)
def test_parts_that_are_no_multiples_of_a_block_are_refused_in_blocks(tmp_path, make, sizes, ranks, fault):
    model = make(**sizes)
    if fault is None:
        assert dict(tensors(model, "fine-grained", engine_ranks=ranks))
        return
    works = rf"{fault} .*; use the format compressed-tensors, or engine_ranks=None \(--engine-ranks 0\) for tr"
    with pytest.raises(ValueError, match=works):
        tensors(model, "fine-grained", engine_ranks=ranks)
    with pytest.raises(ValueError, match=works):
        export(model, tmp_path / "out", engine_ranks=ranks)
    assert not list(tmp_path.iterdir())
    # what the sentence advises is taken
    assert dict(tensors(model, "compressed-tensors", engine_ranks=ranks))
    assert dict(tensors(model, "fine-grained", engine_ranks=None))


def test_input_features_are_divided_among_ranks_too():
    """Of q, k and v each rank has enough outputs, and of the output projection too few inputs."""
    model = llama(head_dim=128, num_attention_heads=2, num_key_value_heads=2, hidden_size=256)
    config = FP8Config(layers=lambda name, module: name.endswith("down_proj"))
    convert_to_fp8(model, config)
    with pytest.raises(ValueError, match=r"down_proj\.weight .*, of which each of 8 ranks has 64 input features"):
        tensors(model, engine_ranks=8)
    assert dict(tensors(model, engine_ranks=4))


def test_latents_that_no_engine_merges_by_this_rule_are_taken():
    """As DeepSeek-V3's own checkpoint, in blocks, with a latent of 576 values."""
    model = build("deepseek_v3")
    assert isinstance(model.config, DeepseekV3Config)
    convert_to_fp8(model, FP8Config(layers=lambda name, module: "_a_proj" in name))
    written = dict(tensors(model))
    assert any(value.dtype is torch.float8_e4m3fn and value.shape[0] % 128 for value in written.values())


@pytest.mark.parametrize("ranks", [0, -1, "2", 2.0, True])
def test_ranks_that_are_none_are_refused(ranks):
    with pytest.raises(ValueError, match=r"engine_ranks is .*; give the engine's tensor parallel size, or None"):
        tensors(llama(), "tensorwise", engine_ranks=ranks)

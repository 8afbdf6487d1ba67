"""The families of models that people train, as transformers writes them: converted, fused where known, and trained."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

from fp8booster import convert_to_fp8, fuse, report

MAJOR = int(transformers.__version__.split(".")[0])
STEPS = 6
_GROUPED = {"num_key_value_heads": 2}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


@dataclass(frozen=True)
class Family:
    """A small model of a family."""

    model_type: str
    sizes: dict[str, Any] = field(default_factory=dict)
    fused: bool = False
    """Its decoder layers and its loss are."""
    since: int = 4
    """The first of the two major versions of transformers, as they are tested, that has it."""


FAMILIES = {
    "LLaMA 2 and 3": Family("llama", _GROUPED, fused=True),
    "LLaMA 4": Family(
        "llama4_text",
        _GROUPED | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "no_rope_layers": [1, 0]},
    ),
    "Mistral": Family("mistral", _GROUPED, fused=True),
    "Qwen2": Family("qwen2", _GROUPED, fused=True),
    "Qwen3": Family("qwen3", _GROUPED | {"head_dim": 16}),
    "Gemma 2": Family("gemma2", _GROUPED | {"head_dim": 16}),
    "Gemma 3": Family("gemma3_text", _GROUPED | {"head_dim": 16}),
    "Phi-3 and 4": Family("phi3", _GROUPED | {"pad_token_id": 0}),
    "Command-R": Family("cohere", _GROUPED),
    "Command-R7B": Family("cohere2", _GROUPED),
    "OLMo 2": Family("olmo2", _GROUPED),
    "Granite": Family("granite", _GROUPED),
    "GLM-4": Family("glm4", _GROUPED | {"head_dim": 16, "pad_token_id": 0}),
    "StableLM": Family("stablelm", _GROUPED),
    "GPT-NeoX": Family("gpt_neox"),
    "GPT-2": Family("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_inner": 96, "n_positions": 64}),
    "DeepSeek V2": Family("deepseek_v2", _LATENT | {"topk_method": "greedy"}, since=5),
    "DeepSeek V3": Family("deepseek_v3", _LATENT),
    "Mixtral": Family("mixtral", _GROUPED | {"num_local_experts": 4}, fused=True),
    "Qwen3-MoE": Family("qwen3_moe", _GROUPED | _EXPERTS | {"head_dim": 16, "num_experts": 4}),
    "gpt-oss": Family("gpt_oss", _GROUPED | {"head_dim": 16, "num_local_experts": 4}, since=5),
}


def build(family: Family) -> nn.Module:
    """A model of 2 layers, hidden 64, in BF16 and training mode; the same at every call."""
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = CONFIG_MAPPING[family.model_type](**sizes | family.sizes)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for module in model.modules():
        if not isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1:  # of routers and experts: some versions leave their memory as it was
                    nn.init.normal_(weight, std=0.02)
    return model.bfloat16().train()


def train(model: nn.Module) -> list[float]:
    """The losses of a few steps on one batch; all gradients are finite."""
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert gradients
        assert all(gradient.isfinite().all() for gradient in gradients.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_each_version_of_transformers_has_the_families_that_it_is_said_to_have() -> None:
    known = {config.model_type for config in MODEL_FOR_CAUSAL_LM_MAPPING}
    assert {name for name, family in FAMILIES.items() if family.model_type in known} == {
        name for name, family in FAMILIES.items() if family.since <= MAJOR
    }


@pytest.mark.parametrize(
    "family", [pytest.param(family, id=name) for name, family in FAMILIES.items() if family.since <= MAJOR]
)
def test_a_family_is_converted_and_trains_as_in_bf16(family: Family) -> None:
    plain = build(family)
    model = convert_to_fp8(copy.deepcopy(plain))
    linear = {name for name, module in plain.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    not_converted = linear - {row.name for row in report(model).fp8}
    assert len(linear) > len(not_converted)
    assert {name.rpartition(".")[2] for name in not_converted} <= {"lm_head", "embed_out", "gate", "router"}
    assert fuse(model).startswith(
        "2 decoder layers fused, loss over chunks of logits" if family.fused else "nothing is fused"
    )
    losses, right = train(model), train(plain)
    fall = right[0] - right[-1]
    assert fall > 0.04  # Command-R divides its logits by 16
    assert losses == pytest.approx(right, abs=0.04 * fall, rel=0)

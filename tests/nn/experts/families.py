"""Tiny models of each family with a mixture of experts, in the transformers that is installed."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

EXPERTS = 8
VOCABULARY = 64

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
_SHARED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "Qwen3-MoE": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "Qwen2-MoE": (
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 32},
    ),
    "OLMoE": ("Olmoe", {"num_experts": EXPERTS}),
    "DeepSeek V3": ("DeepseekV3", {**_LATENT, **_SHARED, "topk_group": 1, "moe_intermediate_size": 48}),
}
if not version("transformers").startswith("4."):
    FAMILIES |= {
        "DeepSeek V2": ("DeepseekV2", {**_LATENT, **_SHARED, "topk_group": 1, "moe_intermediate_size": 48}),
        "gpt-oss": ("GptOss", {"num_local_experts": EXPERTS, "head_dim": 32}),
    }
"""Name of transformers' classes, and arguments of the configuration."""

BALANCED = ("Mixtral", "Qwen3-MoE", "Qwen2-MoE", "OLMoE")
"""Those whose models add a loss that balances their experts, with `output_router_logits`."""


def tiny_mixture(family: str, **options: Any) -> nn.Module:
    """A model of 2 layers, hidden 64, of 8 experts of which a token has 2; the same at every call."""
    name, sizes = FAMILIES[family]
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_SIZES | sizes | options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    # routers and biases that transformers starts with zeros would send all tokens to the first experts
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            if "gate.weight" in each or "router" in each or "bias" in each:
                parameter.normal_(std=0.2)
    return model.train()


def batch_of(rank: int, length: int = 17) -> torch.Tensor:
    """Token numbers [2, length] that differ from rank to rank, int64."""
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(rank))

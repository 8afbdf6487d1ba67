"""Small models of the families whose blocks are fused."""

from __future__ import annotations

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D

MAJOR = int(transformers.__version__.split(".")[0])
VOCABULARY = 128
FAMILIES = ("llama", "mistral", "qwen2")
"""Those whose blocks all have every fused form."""

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
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
SIZES = {
    "llama": _GROUPED,
    "llama4_text": _GROUPED
    | {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 4, "no_rope_layers": [1, 0]},
    "mistral": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": _GROUPED | {"head_dim": 16},
    "gemma2": _GROUPED | {"head_dim": 16},
    "gemma3_text": _GROUPED | {"head_dim": 16},
    "phi3": _GROUPED | {"pad_token_id": 0},
    "cohere": _GROUPED,
    "cohere2": _GROUPED,
    "olmo2": _GROUPED,
    "granite": _GROUPED | {"residual_multiplier": 0.5},
    "glm4": _GROUPED | {"head_dim": 16, "pad_token_id": 0},
    "stablelm": _GROUPED,
    "gpt_neox": {},
    "gpt2": {"n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "deepseek_v2": _LATENT | {"topk_method": "greedy"},
    "deepseek_v3": _LATENT,
    "mixtral": _GROUPED | {"num_local_experts": 4},
    "qwen3_moe": _GROUPED | _EXPERTS | {"head_dim": 16, "num_experts": 4},
    "gpt_oss": _GROUPED | {"head_dim": 16, "num_local_experts": 4},
}
"""What the small models of all families have besides, by type of model."""

INSTALLED = [each for each in SIZES if each in CONFIG_MAPPING]
"""Those that the installed version of transformers has."""


FILLS_CACHES_IN_16_BITS = {"llama4_text"} if MAJOR < 5 else set()
"""Families that cannot train in FP32 with `use_cache`, in the installed version."""


def build(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: object) -> nn.Module:
    """A model of 2 layers, 4 query and 2 key heads, in training mode; the same at every call."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "use_cache": False,
    }
    config = CONFIG_MAPPING[family](**sizes | SIZES[family] | changes)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for module in model.modules():
        if not isinstance(module, (nn.Linear, nn.Embedding, Conv1D)):
            for weight in module.parameters(recurse=False):
                if weight.dim() > 1:  # of routers and experts: some versions leave their memory as it was
                    nn.init.normal_(weight, std=0.02)
    return model.to(dtype).train()


def batch() -> torch.Tensor:
    """Token ids [2, 32]."""
    return torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))

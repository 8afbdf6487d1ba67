"""Small models of the families whose blocks are fused."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
}
VOCABULARY = 128


def build(family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: object) -> nn.Module:
    """A model of 2 layers, 4 query and 2 key heads, in training mode."""
    config_class, model_class = FAMILIES[family]
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    torch.manual_seed(0)
    return model_class(config_class(**sizes | changes)).to(dtype).train()


def batch() -> torch.Tensor:
    """Token ids [2, 32]."""
    return torch.randint(VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))

"""Models that tests of layers share."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def tiny_llama(**options: object) -> LlamaForCausalLM:
    """Two LLaMA layers over 128 tokens, the same at every call."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | options))


def tiny_gpt2() -> GPT2LMHeadModel:
    """Two GPT-2 layers over 128 tokens, without dropout, the same at every call."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))

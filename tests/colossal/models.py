"""Tiny models and batches for tests on CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 128


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A LLaMA of 2 layers, hidden 64, in FP32; equal seeds give equal weights. `options` go to its config."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes | options))


def token_batch(seed: int, batch: int = 2, length: int = 32) -> torch.Tensor:
    """Random token numbers, [batch, length], int64."""
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))

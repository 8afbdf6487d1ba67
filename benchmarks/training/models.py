"""The models that are trained, and what can be counted from their shapes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from fp8booster.cli.train.models import SIZES, Size

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder and its shape."""

    label: str
    size: Size
    family: str = "llama"
    """"llama", or "cohere": attention and feed-forward side by side, and embeddings that are the head too."""

    rope_theta: float = 10000.0

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embeddings'."""
        return self.family == "cohere"

    def shortened(self, layers: int | None) -> Architecture:
        """The same with so many layers; None leaves it."""
        if layers is None:
            return self
        return replace(self, size=replace(self.size, layers=layers))

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's linear layers: q, k, v, o, gate, up, down."""
        size = self.size
        key_value = size.hidden // size.heads * size.key_value_heads
        return 2 * size.hidden**2 + 2 * size.hidden * key_value + 3 * size.hidden * size.feed_forward

    @property
    def product_weights(self) -> int:
        """Weights that every token is multiplied by: the linear layers and the head, without embeddings and norms."""
        return self.size.layers * self.layer_weights + self.size.hidden * self.size.vocabulary

    @property
    def parameters(self) -> int:
        """All of them, a shared one once."""
        norms = self.size.hidden * (self.size.layers * (1 if self.tied else 2) + 1)
        embeddings = 0 if self.tied else self.size.hidden * self.size.vocabulary
        return self.product_weights + embeddings + norms

    def config(self, sequence: int) -> PretrainedConfig:
        """Hugging Face's config, with positions for at least `sequence` tokens."""
        from transformers import CohereConfig, LlamaConfig

        size = self.size
        shape = {
            "hidden_size": size.hidden,
            "intermediate_size": size.feed_forward,
            "num_hidden_layers": size.layers,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_value_heads,
            "vocab_size": size.vocabulary,
            "max_position_embeddings": max(size.sequence, sequence),
            "rope_theta": self.rope_theta,
            "use_cache": False,
            "tie_word_embeddings": self.tied,
        }
        if self.family == "cohere":  # its special tokens must lie in the vocabulary
            return CohereConfig(**shape, bos_token_id=1, eos_token_id=2)
        return LlamaConfig(**shape)


def _llama(label: str, name: str) -> Architecture:
    return Architecture(label=label, size=SIZES[name])


_MICRO = Size(hidden=64, feed_forward=96, layers=2, heads=4, key_value_heads=2, vocabulary=512, sequence=128)

# LLaMA 3: Grattafiori et al., arXiv 2407.21783. Command-R: the config of CohereForAI/c4ai-command-r-v01.
MODELS = {
    "tiny": _llama("tiny LLaMA", "tiny"),
    "100m": _llama("LLaMA 100M", "100m"),
    "1b": _llama("LLaMA 1B", "1b"),
    "7b": _llama("LLaMA-2 7B", "7b"),
    "13b": _llama("LLaMA-2 13B", "13b"),
    "70b": _llama("LLaMA-2 70B", "70b"),
    "llama3-8b": Architecture(
        label="LLaMA-3 8B",
        size=Size(
            hidden=4096,
            feed_forward=14336,
            layers=32,
            heads=32,
            key_value_heads=8,
            vocabulary=128256,
            sequence=8192,
        ),
        rope_theta=5e5,
    ),
    "llama3-70b": Architecture(
        label="LLaMA-3 70B",
        size=Size(
            hidden=8192,
            feed_forward=28672,
            layers=80,
            heads=64,
            key_value_heads=8,
            vocabulary=128256,
            sequence=8192,
        ),
        rope_theta=5e5,
    ),
    "35b": Architecture(
        label="Command-R 35B",
        size=Size(
            hidden=8192,
            feed_forward=22528,
            layers=40,
            heads=64,
            key_value_heads=64,
            vocabulary=256000,
            sequence=8192,
        ),
        family="cohere",
        rope_theta=8e6,
    ),
    "micro": Architecture(label="micro LLaMA", size=_MICRO),
    "micro-cohere": Architecture(label="micro Command-R", size=_MICRO, family="cohere"),
}
"""By the names that `--model` takes; sizes as published, but for the micro ones, which are for tests."""


def build(
    config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device, checkpointing: bool
) -> PreTrainedModel:
    """The model in training mode, with attention by torch's SDPA.

    On a real device its weights are random and follow torch's seed for that kind of device, so equal seeds give equal
    weights on all ranks; on "meta" it has none.
    """
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()

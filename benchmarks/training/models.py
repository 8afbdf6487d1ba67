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
    """"llama"; "cohere": attention and feed-forward side by side, and embeddings that are the head too; "mixtral": a
    router that sends each token to some of `experts` feed-forward blocks."""

    rope_theta: float = 10000.0
    experts: int = 1
    """Feed-forward blocks of a layer."""
    experts_per_token: int = 1
    """Those that a token goes through."""

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
        """Weights of one layer's linear layers: q, k, v, o, gate, up, down, of all experts where it has several."""
        return self._layer_weights(self.experts)

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers, the head included, without embeddings and norms."""
        return self.size.layers * self.layer_weights + self.size.hidden * self.size.vocabulary

    @property
    def product_weights(self) -> int:
        """Weights that a token is multiplied by: `linear_weights` without the experts that it does not go through."""
        active = self._layer_weights(self.experts_per_token)
        return self.size.layers * active + self.size.hidden * self.size.vocabulary

    def _layer_weights(self, experts: int) -> int:
        size = self.size
        key_value = size.hidden // size.heads * size.key_value_heads
        attention = 2 * size.hidden**2 + 2 * size.hidden * key_value
        router = size.hidden * self.experts if self.family == "mixtral" else 0
        return attention + experts * 3 * size.hidden * size.feed_forward + router

    @property
    def parameters(self) -> int:
        """All of them, a shared one once."""
        norms = self.size.hidden * (self.size.layers * (1 if self.tied else 2) + 1)
        embeddings = 0 if self.tied else self.size.hidden * self.size.vocabulary
        return self.linear_weights + embeddings + norms

    def config(self, sequence: int) -> PretrainedConfig:
        """Hugging Face's config, with positions for at least `sequence` tokens."""
        from transformers import CohereConfig, LlamaConfig, MixtralConfig

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
        if self.family == "mixtral":
            return MixtralConfig(**shape, num_local_experts=self.experts, num_experts_per_tok=self.experts_per_token)
        return LlamaConfig(**shape)


def _llama(label: str, name: str) -> Architecture:
    return Architecture(label=label, size=SIZES[name])


_MICRO = Size(hidden=64, feed_forward=96, layers=2, heads=4, key_value_heads=2, vocabulary=512, sequence=128)


def _mixtral(label: str, size: Size) -> Architecture:
    return Architecture(label=label, size=size, family="mixtral", rope_theta=1e6, experts=8, experts_per_token=2)


# LLaMA 3: Grattafiori et al., arXiv 2407.21783. Command-R: the config of CohereForAI/c4ai-command-r-v01. Mixtral: Jiang
# et al., arXiv 2401.04088.
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
            hidden=4096, feed_forward=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256, sequence=8192
        ),
        rope_theta=5e5,
    ),
    "llama3-70b": Architecture(
        label="LLaMA-3 70B",
        size=Size(
            hidden=8192, feed_forward=28672, layers=80, heads=64, key_value_heads=8, vocabulary=128256, sequence=8192
        ),
        rope_theta=5e5,
    ),
    "35b": Architecture(
        label="Command-R 35B",
        size=Size(
            hidden=8192, feed_forward=22528, layers=40, heads=64, key_value_heads=64, vocabulary=256000, sequence=8192
        ),
        family="cohere",
        rope_theta=8e6,
    ),
    "mixtral-8x7b": _mixtral(
        "Mixtral-8x7B",
        Size(hidden=4096, feed_forward=14336, layers=32, heads=32, key_value_heads=8, vocabulary=32000, sequence=32768),
    ),
    "mixtral-1b": _mixtral(
        "Mixtral of 1B active parameters",
        Size(hidden=2048, feed_forward=5632, layers=12, heads=32, key_value_heads=8, vocabulary=32000, sequence=4096),
    ),
    "micro": Architecture(label="micro LLaMA", size=_MICRO),
    "micro-cohere": Architecture(label="micro Command-R", size=_MICRO, family="cohere"),
    "micro-mixtral": _mixtral("micro Mixtral", _MICRO),
}
"""By the names that `--model` takes; sizes as published, but for the micro ones, which are for tests, and mixtral-1b,
whose experts are the feed-forward block of 1b."""


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

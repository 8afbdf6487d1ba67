"""Decoders by name: their shapes, their configs, and the models with random weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster.nn.modules import repeated_layers
from fp8booster.reading import first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from transformers.modeling_utils import PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """A decoder and its shape."""

    label: str
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    _: KW_ONLY
    vocabulary: int = 32000
    sequence: int = 4096
    """Longest sequence the positions are meant for."""
    family: str = "llama"
    """The `model_type` of transformers: "llama", "qwen2", a mixture of experts as "mixtral", or another."""
    rope_theta: float = 10000.0
    experts: int = 1
    """Feed-forward blocks of a layer, each of `feed_forward` features."""
    experts_per_token: int = 1
    """Those that a token goes through."""
    tied: bool = False
    """The head's weight is the embeddings'."""
    head_size: int | None = None
    """Features of a head; None: `hidden` shared among the heads."""

    @property
    def key_value(self) -> int:
        """Output features of k, and of v."""
        return (self.head_size or self.hidden // self.heads) * self.key_value_heads

    def shortened(self, layers: int | None) -> Architecture:
        """Return the same with so many layers; None leaves it."""
        return self if layers is None else replace(self, layers=layers)

    def config(self, sequence: int) -> PretrainedConfig:
        """Return Hugging Face's config, with positions for at least `sequence` tokens.

        Raises:
            ValueError: the installed transformers does not have the family.
        """
        import transformers
        from transformers import CONFIG_MAPPING

        if self.family not in CONFIG_MAPPING:
            raise ValueError(
                f"transformers {transformers.__version__} has no {self.family}, which {self.label} is; install a newer "
                "one"
            )
        shape = {
            "hidden_size": self.hidden,
            "intermediate_size": self.feed_forward,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": max(self.sequence, sequence),
            "rope_theta": self.rope_theta,
            "use_cache": False,
            "tie_word_embeddings": self.tied,
        }
        if self.head_size is not None:
            shape["head_dim"] = self.head_size
        if self.family == "cohere":  # its special tokens must lie in the vocabulary
            shape |= {"bos_token_id": 1, "eos_token_id": 2}
        if self.experts > 1:
            shape["num_experts_per_tok"] = self.experts_per_token
            if self.family == "qwen3_moe":
                shape |= {"num_experts": self.experts, "moe_intermediate_size": self.feed_forward}
            else:
                shape["num_local_experts"] = self.experts
        return CONFIG_MAPPING[self.family](**shape)


def _mixture(architecture: Architecture, sequence: int) -> Architecture:
    return replace(architecture, family="mixtral", sequence=sequence, rope_theta=1e6, experts=8, experts_per_token=2)


_MICRO = Architecture("micro LLaMA", 64, 96, 2, 4, 2, vocabulary=512, sequence=128)
_COMMAND_R: dict[str, Any] = {
    "vocabulary": 256000,
    "sequence": 8192,
    "family": "cohere",
    "tied": True,
    "rope_theta": 8e6,
}
_QWEN: dict[str, Any] = {"sequence": 32768, "family": "qwen2", "rope_theta": 1e6}
_SMALL_QWEN: dict[str, Any] = {"vocabulary": 151936, "tied": True, **_QWEN}
_QWEN_3_MOE: dict[str, Any] = {
    "vocabulary": 151936,
    "sequence": 40960,
    "family": "qwen3_moe",
    "rope_theta": 1e6,
    "experts": 128,
    "experts_per_token": 8,
    "head_size": 128,
}
_MICRO_MOE: dict[str, Any] = {"family": "qwen3_moe", "experts": 128, "experts_per_token": 8}
_GPT_OSS: dict[str, Any] = {
    "vocabulary": 201088,
    "sequence": 131072,
    "family": "gpt_oss",
    "rope_theta": 150000.0,
    "experts": 32,
    "experts_per_token": 4,
    "head_size": 64,
}
_LLAMA_3: dict[str, Any] = {"vocabulary": 128256, "sequence": 8192, "rope_theta": 5e5}

# LLaMA 1: Touvron et al., arXiv 2302.13971. LLaMA 2: Touvron et al., arXiv 2307.09288. LLaMA 3: Grattafiori et al.,
# arXiv 2407.21783. Qwen2.5: Yang et al., arXiv 2412.15115. Command-R: the config of CohereForAI/c4ai-command-r-v01.
# Mixtral: Jiang et al., arXiv 2401.04088. Qwen3: Yang et al., arXiv 2505.09388. gpt-oss: Agarwal et al., arXiv
# 2508.10925.
MODELS = {
    "tiny": Architecture("tiny LLaMA", 256, 688, 4, 4, 4, vocabulary=4096, sequence=2048),
    "60m": Architecture("LLaMA 60M", 512, 1376, 8, 8, 8, sequence=2048),
    "100m": Architecture("LLaMA 100M", 768, 2048, 10, 12, 12),
    "160m": Architecture("LLaMA 160M", 768, 2048, 12, 12, 12, sequence=2048),
    "1b": Architecture("LLaMA 1B", 2048, 5632, 22, 32, 4),
    "7b": Architecture("LLaMA-2 7B", 4096, 11008, 32, 32, 32),
    "13b": Architecture("LLaMA-2 13B", 5120, 13824, 40, 40, 40),
    "30b": Architecture("LLaMA 33B", 6656, 17920, 60, 52, 52, sequence=2048),
    "70b": Architecture("LLaMA-2 70B", 8192, 28672, 80, 64, 8),
    "llama3-8b": Architecture("LLaMA-3 8B", 4096, 14336, 32, 32, 8, **_LLAMA_3),
    "llama3-70b": Architecture("LLaMA-3 70B", 8192, 28672, 80, 64, 8, **_LLAMA_3),
    "qwen2.5-0.5b": Architecture("Qwen2.5-0.5B", 896, 4864, 24, 14, 2, **_SMALL_QWEN),
    "qwen2.5-1.5b": Architecture("Qwen2.5-1.5B", 1536, 8960, 28, 12, 2, **_SMALL_QWEN),
    "qwen2.5-3b": Architecture("Qwen2.5-3B", 2048, 11008, 36, 16, 2, **_SMALL_QWEN),
    "qwen2.5-7b": Architecture("Qwen2.5-7B", 3584, 18944, 28, 28, 4, vocabulary=152064, **_QWEN),
    "35b": Architecture("Command-R 35B", 8192, 22528, 40, 64, 64, **_COMMAND_R),
    "mixtral-8x7b": _mixture(Architecture("Mixtral-8x7B", 4096, 14336, 32, 32, 8), sequence=32768),
    "mixtral-100m": _mixture(Architecture("Mixtral of 100M active parameters", 768, 1024, 12, 12, 12), sequence=2048),
    "mixtral-1b": _mixture(Architecture("Mixtral of 1B active parameters", 2048, 5632, 12, 32, 8), sequence=4096),
    "qwen3-30b-a3b": Architecture("Qwen3-30B-A3B", 2048, 768, 48, 32, 4, **_QWEN_3_MOE),
    "gpt-oss-20b": Architecture("gpt-oss 20B", 2880, 2880, 24, 64, 8, **_GPT_OSS),
    "micro": _MICRO,
    "micro-cohere": replace(_MICRO, label="micro Command-R", family="cohere", tied=True),
    "micro-moe": replace(_MICRO, label="micro Qwen3-MoE", feed_forward=32, **_MICRO_MOE),
    "micro-mixtral": _mixture(replace(_MICRO, label="micro Mixtral"), sequence=128),
}
"""Sizes as published, except for the micro ones, which are for tests, and mixtral-100m and mixtral-1b: a token goes
through as much as in 160m, and through twice the feed-forward block of 1b."""

SIZES = ("tiny", "100m", "1b", "7b", "13b", "30b", "70b", "qwen2.5-7b")
"""The names that `fp8booster train --model` takes."""


def build(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    checkpointing: bool | int = False,
) -> PreTrainedModel:
    """Return a model in training mode, with attention by torch's SDPA where transformers gives it that.

    Its weights are random and follow torch's seed for that kind of device, so equal seeds give equal weights on all
    ranks; on "meta" it has none.
    """
    # made where it stays: a copy on the host would not fit for the largest
    return prepared(model_of_config(config, device, torch_dtype=dtype), checkpointing)


def model_of_config(
    config: PretrainedConfig, place: AbstractContextManager[Any] | None = None, **options: Any
) -> PreTrainedModel:
    """Return the causal language model that transformers builds from a config.

    Args:
        place: where tensors are made; None: all on "meta", without memory.
        options: of transformers' constructor.

    Raises:
        ValueError: there is none, or its code raises over a config that nobody checked.
    """
    kind, attention = causal_lm(config), attention_of(config)
    try:
        with place or torch.device("meta"):
            model = kind._from_config(config, attn_implementation=attention, **options)
    except Exception as error:
        where = Path(config.name_or_path) / "config.json" if config.name_or_path else "the config"
        raise ValueError(
            f"transformers builds no model from {where} ({type(error).__name__}: {first_line(error)}); correct the "
            "config."
        ) from None
    model.tie_weights()
    return model


def causal_lm(config: PretrainedConfig) -> Any:
    """Return the class of transformers for the causal language model of a config.

    Raises:
        ValueError: there is none, or the config names a model of transformers with another head.
    """
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    kinds: Any = MODEL_FOR_CAUSAL_LM_MAPPING  # typed as None where transformers is lazy
    if type(config) not in kinds:
        raise ValueError(
            f"transformers has no causal language model of the type {config.model_type!r}; give one that it has, as "
            "llama or qwen2."
        )
    kind = kinds[type(config)]
    for name in config.architectures or ():
        # not a bare body, whose head may be its embedding, nor a name that an earlier version gave the same model
        if name != kind.__name__ and not name.endswith("Model") and hasattr(transformers, name):
            raise ValueError(
                f"the model is a {name}, and fp8booster reads causal language models, here a {kind.__name__}; load it "
                "with transformers' from_pretrained."
            )
    return kind


def attention_of(config: PretrainedConfig) -> str:
    """Return the `attn_implementation` to ask transformers for: torch's SDPA, or else what the model itself has."""
    return "sdpa" if causal_lm(config)._supports_sdpa else "eager"


def prepared(model: PreTrainedModel, checkpointing: bool | int) -> PreTrainedModel:
    """Return the model in training mode; with `checkpointing` all its layers, or so many, recompute activations."""
    if checkpointing:
        recompute(model, None if checkpointing is True else checkpointing)
    return model.train()


_FLAG = "gradient_checkpointing"
"""Of layers of transformers 5, and of models of 4.51."""


def recompute(model: Any, layers: int | None = None) -> None:
    """Let layers of a transformers model keep their inputs alone, and compute the rest again in backward.

    Args:
        model: in place.
        layers: the first so many, which lets the last ones' activations go before the first's are computed again.
            None: all.

    Raises:
        ValueError: the model does not have so many.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layers is None:
        return
    found = repeated_layers(model)
    if layers > len(found):
        raise ValueError(f"the model has {len(found)} layers; checkpoint at most so many, not {layers}.")
    for layer in found[layers:]:
        setattr(layer, _FLAG, False)
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module) and module not in found:
            # of 4.51, where the model asks for each of its layers
            module._gradient_checkpointing_func = partial(_checkpoint_chosen, module._gradient_checkpointing_func)


def _checkpoint_chosen(checkpoint: Callable[..., Any], call: Callable[..., Any], *args: Any) -> Any:
    """Call a layer through `checkpoint`, unless the layer keeps its activations."""
    bound: Any = call
    while isinstance(bound, partial):
        bound = bound.func
    layer: nn.Module = getattr(bound, "__self__", bound)
    return checkpoint(call, *args) if getattr(layer, _FLAG, True) else call(*args)

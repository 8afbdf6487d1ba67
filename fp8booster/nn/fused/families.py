"""The model families of transformers whose decoder layers are fused, and the names that their parts have.

A part is known by the layers that it has. What it computes is not written down here but tried out, in the version of
transformers that is installed, before it is fused (`nn.fused.trials`); decoder layers run as
transformers wrote them (`nn.fused.lazy`). So one list serves the versions 4.51.3 to 5.24, which differ in what
layers take and return, in what caches are called and are told, and in whether experts are modules.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

FAMILIES = {
    "llama": "LLaMA 2 and 3",
    "llama4": "LLaMA 4",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "phi3": "Phi-3 and 4",
    "cohere": "Command-R",
    "cohere2": "Command-R7B",
    "olmo2": "OLMo 2",
    "granite": "Granite",
    "glm4": "GLM-4",
    "stablelm": "StableLM",
    "gpt_neox": "GPT-NeoX",
    "gpt2": "GPT-2",
    "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3",
    "gpt_oss": "gpt-oss",
}
"""Names of the families, by transformers' folder."""

_MODEL_NAMES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}

MODELS = {
    f"transformers.models.{folder}.modeling_{folder}": _MODEL_NAMES.get(folder, f"{folder.capitalize()}ForCausalLM")
    for folder in FAMILIES
}
"""Module and name of the models whose loss is computed over chunks of logits."""


@dataclass(frozen=True)
class Part:
    """A part of a decoder layer with linear layers of one input."""

    name: str  # in messages
    merged: tuple[str, ...]
    """Its linear layers of one input, which are multiplied as one, in their order; or one layer that is their like."""

    output: str  # the linear layer that reads what is made of theirs
    of_latents: tuple[str, ...] = ()
    """Linear layers between, which make heads of the latents that the first ones make, as far as it has them."""


ATTENTION, MLP, EXPERT = "attention", "MLP", "expert"

PARTS = (
    Part(ATTENTION, ("q_proj", "k_proj", "v_proj"), "o_proj"),
    Part(ATTENTION, ("qkv_proj",), "o_proj"),
    Part(ATTENTION, ("query_key_value",), "dense"),
    # of latents (DeepSeek V2, arXiv 2405.04434, section 2.1), with a latent of the queries or without
    Part(ATTENTION, ("q_a_proj", "kv_a_proj_with_mqa"), "o_proj", ("q_b_proj", "kv_b_proj")),
    Part(ATTENTION, ("q_proj", "kv_a_proj_with_mqa"), "o_proj", ("kv_b_proj",)),
    Part(MLP, ("gate_proj", "up_proj"), "down_proj"),
    Part(MLP, ("gate_up_proj",), "down_proj"),
    Part(EXPERT, ("w1", "w3"), "w2"),
    # without a gate
    Part(MLP, ("dense_h_to_4h",), "dense_4h_to_h"),
    Part(MLP, ("c_fc",), "c_proj"),
)
"""A part is the first that has all its layers."""


def part_of(module: nn.Module) -> Part | None:
    """Return the part of a decoder layer that a module is, by the layers that it has."""
    held = module._modules
    return next(
        (part for part in PARTS if all(held.get(name) is not None for name in (*part.merged, part.output))), None
    )


def is_known(cls: type[nn.Module]) -> bool:
    """Tell whether a class is one of transformers' for the language models of these families."""
    return cls.__module__ in MODELS and "Vision" not in cls.__name__


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module is an attention, fused or not."""
    return "Attention" in type(module).__name__


WITH_SINKS = "eager"
"""The `attn_implementation` that an attention with sinks must have to be fused: transformers gives it no SDPA."""


def has_sinks(module: nn.Module) -> bool:
    """Tell whether a module is an attention with a sink for each head, as gpt-oss has them."""
    # FSDP makes a view of its flat parameter of it, which is none
    return is_attention(module) and getattr(module, "sinks", None) is not None

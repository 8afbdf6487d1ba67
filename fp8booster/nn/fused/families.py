"""The model families whose decoder layers are fused, and what transformers 4.51.3 to 5.23 call what they consist of.

LLaMA, Mistral, Mixtral and Qwen2 share one structure. The versions of transformers differ in

                                    4.51.3                              5.23
    a decoder layer returns         a tuple                             the hidden states
    its cache is called             past_key_value                      past_key_values
    the cache is told               cos, sin, the tokens' places        nothing
    SiLU is                         torch's                             a class of their own
    a Mixtral's experts are         modules, in block_sparse_moe        one parameter, in mlp: not fused

What a decoder layer or an attention takes is read from its forward, and what a layer returns is tried out
(`nn.fused.decoder`), since versions between the two have some of each.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

FAMILIES = ("Llama", "Mistral", "Mixtral", "Qwen2")
"""Prefixes of the classes."""

MODULES = {family: f"transformers.models.{family.lower()}.modeling_{family.lower()}" for family in FAMILIES}
"""Where the classes are."""

MODELS = {MODULES[family]: f"{family}ForCausalLM" for family in FAMILIES}
"""Module and name of the models for causal language modelling."""


@dataclass(frozen=True)
class Part:
    """A part of a decoder layer."""

    name: str
    """In messages."""

    merged: tuple[str, ...] = ()
    """Its linear layers of one input, which are multiplied as one, in their order."""

    output: str = ""
    """The linear layer that reads what is made of theirs."""


PARTS = {
    "RMSNorm": Part("norm"),
    "Attention": Part("attention", ("q_proj", "k_proj", "v_proj"), "o_proj"),
    "MLP": Part("MLP", ("gate_proj", "up_proj"), "down_proj"),
    "BlockSparseTop2MLP": Part("expert", ("w1", "w3"), "w2"),
    "DecoderLayer": Part("residuals"),
}
"""By the names of their classes without the family's."""

SILU = ("SiLU", "SiLUActivation")
"""Classes of the activation that is fused."""


def decoder_part(cls: type[nn.Module]) -> Part | None:
    """The part of a decoder layer that a class of transformers' is; None for all other classes."""
    for family, module in MODULES.items():
        if cls.__module__ == module:
            return PARTS.get(cls.__name__.removeprefix(family))
    return None

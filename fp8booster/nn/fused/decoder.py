"""Decoder layers of LLaMA, Mistral, Mixtral and Qwen2 with their pointwise parts fused around the products.

In place, by class: parameters, their names, hooks and `isinstance` stay as they were. A fused layer computes

    y, h = norm(x)                      one kernel; h is x
    q, k, v = rotate(qkv product of y)  one product, one kernel
    y, h = norm(attention, h)           one kernel: residual, norm
    x = h + down(swiglu(gate-up product of y))   in Mixtral each expert so, on its tokens

and every kernel delivers the amax of what it makes, so that the casts before FP8 products read their input once. The
products are those of FP8 layers, or of layers that stayed nn.Linear. Where a case is not covered (returned attention
weights, another activation, layers of different kinds) that part runs as transformers wrote it.

What a fused part takes and returns is what the forward of its own class takes and returns (`_mixed_class`), which
depends on the version of transformers (`nn.fused.families`).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import nn

from fp8booster.nn.fused.attention import attend, attend_packed, attends_alike
from fp8booster.nn.fused.families import PARTS, SILU, Part, decoder_part
from fp8booster.nn.fused.merged_layers import Merged, MergedLayers, MergedLinears
from fp8booster.nn.fused.packing import Sequences, let_pack, sequences_of
from fp8booster.nn.fused.pointwise import rms_norm, split_and_rotate, swiglu
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import cached_by_class, is_looked_at


class FusedPart(nn.Module):
    """Mixin of a part with linear layers of one input."""

    part: ClassVar[Part]
    fp8_merged: Merged

    def merged_product(self, input: torch.Tensor) -> torch.Tensor | None:
        """What the merged layers make of an input; None: call the layers, which the part has now, one by one."""
        layers = [getattr(self, name) for name in self.part.merged]
        return self.fp8_merged(input) if self.fp8_merged.stands_for(*layers) else None


class FusedRMSNorm(nn.Module):
    """Mixin of a norm."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        both: bool = False,
        encoded: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of `hidden_states + residual`; with `both`, that sum too. `encoded` saves the sum in 8 bits."""
        y, h = rms_norm(hidden_states, self.weight, self.variance_epsilon, residual, encoded=encoded)
        return (y, h) if both else y


class FusedAttention(FusedPart):
    """Mixin of a self-attention."""

    config: Any
    o_proj: nn.Module
    head_dim: int
    num_key_value_groups: int
    layer_idx: int
    attention_dropout: float
    scaling: float

    native_arguments: ClassVar[tuple[str, ...]]
    """Names of what the class's own forward takes after the hidden states."""

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As transformers', with one product for q, k and v."""
        arguments = dict(zip(self.native_arguments, args, strict=False)) | kwargs
        cos, sin = arguments["position_embeddings"]
        sequences = sequences_of(arguments["position_embeddings"])
        is_alike = cos.shape[-1] == self.head_dim and self.attends_alike(**arguments)
        qkv = self.merged_product(hidden_states) if is_alike else None
        if qkv is None and sequences is None:
            return self.forward_unfused(hidden_states, **arguments)
        if not is_alike:
            raise ValueError(
                "attention of packed sequences is causal, with rotary embedding of whole heads, and gives no weights; "
                "leave out output_attentions, is_causal and the like, or pad the sequences"
            )
        if qkv is None:  # in evaluation, or with an adapter
            qkv = torch.cat([getattr(self, name)(hidden_states) for name in self.part.merged], -1)
        qkv = self.before_attention(qkv)
        # of the product, not of the input: ranks may hold heads, and parts of the sequence that it has gathered
        key_heads = self.key_heads_in(qkv)
        heads = split_and_rotate(qkv, cos, sin, query_heads=key_heads * self.num_key_value_groups, key_heads=key_heads)
        query, key, value = (each.transpose(1, 2) for each in heads)
        key, value = self.cached(key, value, arguments)
        if sequences is None:
            attended = self.attend(query, key, value, arguments.get("attention_mask"))
        elif key.shape[2] == query.shape[2]:
            attended = self.attend_packed(query, key, value, sequences)
        else:
            raise ValueError("packed sequences cannot go on from a cache; leave past_key_values out")
        return self.o_proj(self.after_attention(attended.transpose(1, 2)).flatten(2)), None

    def cached(
        self, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [B, H, S, D], with those before them; also in training, where `use_cache` was left on."""
        names = self.native_arguments
        cache = arguments.get("past_key_values" if "past_key_values" in names else "past_key_value")
        if cache is None:
            return key, value
        if "cache_position" not in names:  # the cache counts by itself
            return cache.update(key, value, self.layer_idx)
        cos, sin = arguments["position_embeddings"]
        place = {"sin": sin, "cos": cos, "cache_position": arguments.get("cache_position")}
        return cache.update(key, value, self.layer_idx, place)

    def key_heads_in(self, qkv: torch.Tensor) -> int:
        """Heads of keys in q, k and v side by side, [..., features]."""
        return qkv.shape[-1] // self.head_dim // (self.num_key_value_groups + 2)

    def before_attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """q, k and v, [B, S, features], of the tokens and heads that attend here; nothing else may read them."""
        return qkv

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention gave, [B, S, H, D], as [B, S', H', D] of the tokens and heads that `o_proj` takes here."""
        return attended

    def attends_alike(self, **arguments: Any) -> bool:
        """Whether `attend` computes what the unfused forward does with these arguments."""
        return attends_alike(self.config._attn_implementation, arguments)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """The attention of query [B, Hq, S, D] to key and value [B, Hkv, S', D]: [B, Hq, S, D]."""
        dropout = self.attention_dropout if self.training else 0.0
        return attend(query, key, value, attention_mask, dropout=dropout, scale=self.scaling)

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """The attention, [B, Hq, S, D], of each sequence to itself; keys and values are [B, Hkv, S, D]."""
        dropout = self.attention_dropout if self.training else 0.0
        # where an attention has none of its own, transformers takes the model's
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        return attend_packed(query, key, value, sequences, window=window, dropout=dropout, scale=self.scaling)

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What runs where `forward` does not cover a case."""
        return super().forward(*args, **kwargs)


class FusedMLP(FusedPart):
    """Mixin of a feed-forward block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As transformers', with one product for gate and up."""
        gate_up = self.merged_product(x)
        if gate_up is None:
            return self.forward_unfused(x)
        return getattr(self, self.part.output)(swiglu(gate_up, encoded=self.fp8_merged.saves_in_8_bits))

    @property
    def saves_in_8_bits(self) -> bool:
        """Whether gate and up are saved so for backward, as far as it is known."""
        return self.fp8_merged.saves_in_8_bits and self.fp8_merged.why_not_merged is None

    def forward_unfused(self, x: torch.Tensor) -> torch.Tensor:
        """What runs where gate and up are not merged."""
        return super().forward(x)


class FusedExpert(FusedMLP):
    """Mixin of one of Mixtral's experts."""

    w1: nn.Module
    w2: nn.Module
    w3: nn.Module
    act_fn: nn.Module

    def forward_unfused(self, x: torch.Tensor) -> torch.Tensor:
        # w3 first: then backward gives gradients in the order of the one product, which a rank may run whose expert has
        # other tokens; ZeRO adds up gradients of ranks in the order in which they come
        up = self.w3(x)
        return self.w2(self.act_fn(self.w1(x)) * up)


class FusedDecoderLayer(nn.Module):
    """Mixin of a decoder layer whose norms are fused: the second adds the residual."""

    input_layernorm: nn.Module
    self_attn: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    native_arguments: ClassVar[tuple[str, ...]]
    """Names of what the class's own forward takes after the hidden states."""

    returns_tuple: ClassVar[bool]
    """Whether the class's own forward returns a tuple, or the hidden states by themselves."""

    def norms(self) -> tuple[nn.Module, nn.Module]:
        """Before attention and before the feed-forward block."""
        return self.input_layernorm, self.post_attention_layernorm

    @property
    def saves_in_8_bits(self) -> bool:
        """Whether its norms save so for backward what they read."""
        merged = getattr(self.self_attn, "fp8_merged", None)
        return merged is not None and merged.saves_in_8_bits

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        arguments = dict(zip(self.native_arguments, args, strict=False)) | kwargs
        output_router_logits = arguments.pop("output_router_logits", False)
        encoded = self.saves_in_8_bits
        hidden_states, residual = _normed(self.input_layernorm, hidden_states, encoded=encoded)
        hidden_states, weights = self.self_attn(hidden_states=hidden_states, **arguments)
        hidden_states, residual = _normed(self.post_attention_layernorm, hidden_states, residual, encoded=encoded)
        made = (getattr(self, "block_sparse_moe", None) or self.mlp)(hidden_states)
        made, router_logits = made if isinstance(made, tuple) else (made, None)
        hidden_states = residual + made
        if not self.returns_tuple:
            return hidden_states
        outputs: tuple[torch.Tensor | None, ...] = (hidden_states,)
        if arguments.get("output_attentions"):
            outputs += (weights,)
        return (*outputs, router_logits) if output_router_logits else outputs


def _normed(
    norm: nn.Module, hidden_states: torch.Tensor, residual: torch.Tensor | None = None, *, encoded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of a sum, or of what is given alone, and the sum; hooks see the norm as transformers calls it."""
    if not is_looked_at(norm):
        return norm(hidden_states, residual, both=True, encoded=encoded)
    total = hidden_states if residual is None else residual + hidden_states
    return norm(total), total


ReplacedAttention = Callable[[nn.Module], type[FusedAttention] | str]
"""The mixin for an attention whose forward an engine has replaced, or why there is none."""

REPLACED = "its forward was replaced"


def fuse_blocks(model: nn.Module, replaced_attention: ReplacedAttention | None = None) -> int:
    """Fuse the decoder layers of a model, in place, around the products of FP8 layers or of plain nn.Linear.

    Args:
        model: any module; what is no decoder layer of `FAMILIES` is left alone, and so is a layer that another pipeline
            stage holds. `unfused_parts` has what else is.
        replaced_attention: knows the attentions of an engine; None where there are none.

    Returns:
        The number of decoder layers fused.
    """
    fused = 0
    # inner modules first: a layer is fused if its norms are
    for module in reversed(list(model.modules())):
        part = decoder_part(type(module))
        if part is None or next(module.parameters(), None) is None:
            continue
        mixin = _mixin(module, part, replaced_attention)
        if isinstance(mixin, str):
            module.__dict__[_WHY_NOT] = f"{part.name}: {mixin}"
            continue
        mix(mixin, module)
        fused += mixin is FusedDecoderLayer
    for module in model.modules():
        if any(isinstance(part, FusedAttention) for part in module.modules()):
            let_pack(module)
    return fused


def mix(mixin: type[nn.Module], module: nn.Module) -> None:
    """Put a mixin before the class of a module of transformers', and merge the module's layers of one input."""
    module.__class__ = _mixed_class(mixin, type(module))
    if isinstance(module, FusedPart):
        layers = [getattr(module, name) for name in module.part.merged]
        module.__dict__["fp8_merged"] = MergedLayers(layers) if _in_fp8(layers) else MergedLinears(layers)


def unfused_parts(model: nn.Module) -> Counter[str]:
    """How many parts of decoder layers `fuse_blocks` left alone, by what they are and why."""
    return Counter(module.__dict__[_WHY_NOT] for module in model.modules() if _WHY_NOT in module.__dict__)


_WHY_NOT = "_fp8booster_unfused"


def _mixin(module: nn.Module, part: Part, replaced_attention: ReplacedAttention | None) -> type[nn.Module] | str:
    """What a part of a decoder layer is fused by, or why it is not."""
    layers = [getattr(module, name) for name in part.merged]
    if not _in_fp8(layers) and not all(type(layer) is nn.Linear for layer in layers):
        return f"{', '.join(part.merged)} are neither all FP8 layers nor all nn.Linear"
    if part is PARTS["Attention"]:
        if "forward" in vars(module):
            return REPLACED if replaced_attention is None else replaced_attention(module)
        config: Any = module.config
        kind = config._attn_implementation
        return FusedAttention if kind == "sdpa" else f"attn_implementation={kind!r} has no fused form"
    if "forward" in vars(module):
        return REPLACED
    if part is PARTS["DecoderLayer"]:
        for norm in (module.input_layernorm, module.post_attention_layernorm):
            if not isinstance(norm, FusedRMSNorm):
                return f"a norm is a {type(norm).__name__} that was not fused"
        if _returns_tuple(type(module)) is None:
            return f"{type(module).__name__} computes something else than this version knows"
    elif part.merged and type(module.act_fn).__name__ not in SILU:
        return f"its activation is {type(module.act_fn).__name__}"
    return _MIXINS[part]


_MIXINS = {
    PARTS["RMSNorm"]: FusedRMSNorm,
    PARTS["MLP"]: FusedMLP,
    PARTS["BlockSparseTop2MLP"]: FusedExpert,
    PARTS["DecoderLayer"]: FusedDecoderLayer,
}


def _in_fp8(layers: list[nn.Module]) -> bool:
    return all(isinstance(layer, FP8Layer) for layer in layers)


@cached_by_class
def _mixed_class(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    members: dict[str, Any] = {"__doc__": mixin.__doc__, "__reduce__": _reduce}
    if issubclass(mixin, FusedPart):
        members["part"] = decoder_part(original)
    if issubclass(mixin, (FusedAttention, FusedDecoderLayer)):
        _, _, *names = inspect.signature(original.forward).parameters
        members["native_arguments"] = tuple(names)
    if issubclass(mixin, FusedDecoderLayer):
        members["returns_tuple"] = _returns_tuple(original)
    return type(f"Fused{original.__name__}", (mixin, original), members)


@cached_by_class
def _returns_tuple(layer: type[nn.Module]) -> bool | None:
    """Whether the forward of a class of decoder layers returns a tuple, or the hidden states by themselves.

    It is run once on a number, with parts that multiply by a prime each, so that what it computes is seen as well.

    Returns:
        None: it does not compute h = x + attention(norm(x)), h + feed_forward(norm(h)).
    """
    forward = inspect.unwrap(layer.forward)
    # transformers 4.51's experts return their router's logits too
    for feed_forward in (lambda x: 7.0 * x, lambda x: (7.0 * x, None)):
        parts = SimpleNamespace(
            input_layernorm=lambda x: 2.0 * x,
            self_attn=lambda hidden_states, **_: (3.0 * hidden_states, None),
            post_attention_layernorm=lambda x: 5.0 * x,
            mlp=feed_forward,
            block_sparse_moe=feed_forward,
        )
        try:
            output = forward(parts, 1.0)
        except (TypeError, ValueError, AttributeError):
            continue
        if output in (252.0, (252.0,)):  # 7 + 7 * 5 * 7, with h = 1 + 3 * 2
            return isinstance(output, tuple)
    return None


def _reduce(module: nn.Module) -> tuple:
    # by the two classes that are in modules: a pickle finds no mixed one there
    return _unpickled, type(module).__bases__, module.__dict__


def _unpickled(mixin: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    mixed = _mixed_class(mixin, original)
    return mixed.__new__(mixed)

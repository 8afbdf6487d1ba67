"""Self-attention of a decoder layer, from the product of q, k and v to that of its output."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fp8booster.config import FP8Config
from fp8booster.nn.fused.attention import attend, attend_packed, why_unlike
from fp8booster.nn.fused.attention_form import (
    Form,
    cos_and_sin,
    dropout_of,
    form_after_changes,
    head_size,
    heads_of_a_key,
    is_of_form,
)
from fp8booster.nn.fused.caches import CACHES
from fp8booster.nn.fused.families import WITH_SINKS, has_sinks
from fp8booster.nn.fused.norm import FusedNorm, HeadNorms
from fp8booster.nn.fused.packing import Sequences, sequences_of
from fp8booster.nn.fused.part import FusedPart, own_product
from fp8booster.nn.fused.pointwise import latent_heads, rotate_heads, split_and_rotate
from fp8booster.nn.linear.layer import config_around
from fp8booster.nn.modules import may_be_bypassed, run_with
from fp8booster.nn.weights.delivered import deliver_as_saved


class MergedAttention(FusedPart):
    """Mixin of a self-attention as transformers wrote it, whose layers of one input are one product."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple:
        product = self.merged_product(hidden_states)
        if product is None:
            return super().forward(hidden_states, *args, **kwargs)
        projections = self._projections(hidden_states, product)
        return run_with(MergedAttention._as_written, self, projections, hidden_states, *args, **kwargs)

    def _as_written(self, *args: Any, **kwargs: Any) -> tuple:
        return super().forward(*args, **kwargs)

    def _projections(self, input: Tensor, product: Tensor) -> dict[str, Callable]:
        """Return what stands in for the merged layers: it gives their parts of the one product of their input."""
        names = self.part.merged
        layers = [getattr(self, name) for name in names]
        # of the product, not of the layers: ranks may hold parts of these
        whole = sum(layer.out_features for layer in layers)
        widths = [layer.out_features * product.shape[-1] // whole for layer in layers]
        return {
            name: lambda x, layer=layer, part=part: part if x is input else layer(x)
            for name, layer, part in zip(names, layers, product.unsafe_split_with_sizes(widths, -1), strict=True)
        }


class FusedAttention(MergedAttention):
    """Mixin of a self-attention that PyTorch's SDPA computes; q and k may have norms, each head's or all heads'."""

    config: Any
    layer_idx: int
    floor_scale: int
    use_rope: bool
    sinks: Tensor

    form: Form = Form()

    unfused_calls: dict[str, None]  # why some calls in training ran as transformers wrote them
    native_arguments: ClassVar[tuple[str, ...]]  # names of what the class's own forward takes after the hidden states

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        _, _, *names = inspect.signature(original.forward).parameters
        return super().members_before(original) | {"native_arguments": tuple(names)}

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As transformers', with one product for q, k and v."""
        arguments = dict(zip(self.native_arguments, args, strict=False)) | kwargs
        embeddings = arguments["position_embeddings"]
        sequences = sequences_of(embeddings)
        self.look_at_attributes()
        angles = cos_and_sin(embeddings, self.form.angles) if self.form.rotation.rotates else None
        reason = self.why_not_now or self.why_unlike(**arguments)
        if angles is not None and not self.takes_places(angles[0].shape[-1]):
            reason = "there are angles for more places than a head has"
        is_one = sequences is None and self.is_tempered
        if is_one and (hidden_states.shape[1] >= self.floor_scale or self.cache_in(arguments) is not None):
            reason = f"queries are scaled from token {self.floor_scale} on, or behind a cache"
        qkv = self.merged_product(hidden_states) if reason is None else None
        if qkv is None and sequences is None:
            if self.training and not torch.compiler.is_compiling():
                self.unfused_calls[reason or "its layers of one input ran one by one"] = None
            return self.forward_unfused(hidden_states, **arguments)
        if reason is not None:
            raise ValueError(
                f"attention of packed sequences is causal, and gives no weights ({reason}); "
                "leave out output_attentions, is_causal and the like, or pad the sequences"
            )
        if qkv is None:  # in evaluation, or with an adapter: the sequences must be kept apart all the same
            qkv = torch.cat([getattr(self, name)(hidden_states) for name in self.part.merged], -1)
        qkv = self.before_attention(qkv)
        query, key, value = self.rotated(qkv, angles)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        cache = self.cache_in(arguments)
        if cache is not None:
            key, value = self.cached(key, value, cache, arguments)
        if sequences is None:
            attended = self.attend(query, key, value, arguments.get("attention_mask"))
        elif key.shape[2] == query.shape[2]:
            attended = self.attend_packed(query, key, value, sequences)
        else:
            raise ValueError("packed sequences cannot go on from a cache; give none to the model")
        heads = self.after_attention(attended.transpose(1, 2)).flatten(2)
        recast_by = self.recast_by if torch.is_grad_enabled() else None
        if recast_by is not None and heads.data_ptr() == attended.data_ptr():  # of a copy attention saves nothing
            deliver_as_saved(heads, one_scale=recast_by.granularity == "tensorwise")
        output = getattr(self, self.part.output)(heads)
        return (output, None, cache)[: self.form.outputs]

    def look_at_attributes(self) -> None:
        """Find the form anew where attributes have changed."""
        if not is_of_form(self, self.form):
            self.form = form_after_changes(self, self.part)

    @property
    def takes_rows(self) -> bool:
        """Tell whether it can be told that each row is a sequence, as it is now."""
        self.look_at_attributes()
        return self.why_not_now is None and getattr(self, "is_causal", True)

    @property
    def why_not_now(self) -> str | None:
        """The reason why it is not fused as it is now; None: it is."""
        if self.why_replaced is not None:
            return self.why_replaced
        for norm in head_norms(self):
            if not (isinstance(norm, HeadNorms) or (isinstance(norm, FusedNorm) and norm.why_not_now is None)):
                return "a norm of its heads was replaced by one that has no fused form"
        return None if self.form.fused else "its attributes have changed, and it computes something else now"

    @property
    def recast_by(self) -> FP8Config | None:
        """By what backward casts again what attention gives its output projection; None: it does not."""
        # nor where ranks exchange it in between: then attention saves another tensor than the projection reads
        if torch.compiler.is_compiling() or type(self).after_attention is not FusedAttention.after_attention:
            return None
        config = config_around([getattr(self, self.part.output)])
        return config if config is not None and config.recasts_attention else None

    def rotated(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """Return q, k and v, [B, S, H, D], of which q and k have gone through their norms and were rotated.

        Args:
            qkv: [B, S, features].
            angles: cos and sin; None rotates nothing.
        """
        # of the product, not of the input: ranks may hold heads, and parts of the sequence that it has gathered
        key_heads = self.key_heads_in(qkv)
        query_heads, size = key_heads * heads_of_a_key(self), head_size(self)
        pairs = self.form.pairs
        norms = head_norms(self)
        if angles is not None and (not norms or self.form.normed_last):
            cos, sin = angles
            groups = key_heads if self.form.grouped else 1
            query, key, value = split_and_rotate(
                qkv, cos, sin, query_heads=query_heads, key_heads=key_heads, groups=groups, **pairs
            )
            if norms:
                query, key = self._normal(norms, [query, key])
            return query, key, value
        *split, value = qkv.split([heads * size for heads in (query_heads, key_heads, key_heads)], -1)
        query, key = (each.unflatten(-1, (-1, size)) for each in split)
        if norms:
            # what hooks saw is not written over
            seen = [isinstance(norm, nn.Module) and not may_be_bypassed(norm) for norm in norms]
            normal = self._normal(norms, [query, key])
            query, key = (each.clone() if is_seen else each for is_seen, each in zip(seen, normal, strict=True))
        if angles is not None:
            cos, sin = angles
            query, key = rotate_heads(query, key, cos, sin, **pairs)
        return query, key, value.unflatten(-1, (-1, size))

    def _normal(self, norms: list[Any], heads: list[Tensor]) -> list[Tensor]:
        """Return what the norms of queries and of keys give of these heads, [B, S, H, D]."""
        first = norms[0]
        of_all = not isinstance(first, HeadNorms) and (
            first.computes.weighted and first.weight.shape[-1] != head_size(self)
        )
        return [
            norm(each.flatten(-2) if of_all else each).view(each.shape) for norm, each in zip(norms, heads, strict=True)
        ]

    def takes_places(self, places: int) -> bool:
        """Tell whether so many places of a head can be rotated."""
        return places <= head_size(self)

    @property
    def is_tempered(self) -> bool:
        """Tell whether queries from token `floor_scale` on are scaled by place, as in LLaMA 4 (arXiv 2501.19399)."""
        return bool(getattr(self, "attn_temperature_tuning", False)) and not self.use_rope

    def cache_in(self, arguments: dict[str, Any]) -> Any:
        """Return the cache that a layer is given, if any; also in training, where `use_cache` was left on."""
        taken = False
        for name in CACHES:  # the layer takes the first of its names, and those that are older
            taken |= name in self.native_arguments
            if taken and arguments.get(name) is not None:
                return arguments[name]
        return None

    def cached(self, key: Tensor, value: Tensor, cache: Any, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return keys and values, [B, H, S, D], with those before them."""
        if "cache_position" not in self.native_arguments:  # the cache counts by itself
            return cache.update(key, value, self.layer_idx)
        place = {"cache_position": arguments.get("cache_position")}
        if self.form.rotation.rotates and self.form.angles != "complex":
            cos, sin = arguments["position_embeddings"]
            place |= {"sin": sin, "cos": cos}
        if hasattr(self, "rotary_ndims"):
            place["partial_rotation_size"] = self.rotary_ndims
        if getattr(self, "sliding_window", None) is not None:
            place["sliding_window"] = self.sliding_window
        return cache.update(key, value, self.layer_idx, place)

    def key_heads_in(self, qkv: Tensor) -> int:
        """Count the heads of keys in q, k and v side by side, [..., features]."""
        return qkv.shape[-1] // head_size(self) // (heads_of_a_key(self) + 2)

    def before_attention(self, qkv: Tensor) -> Tensor:
        """Return q, k and v, [B, S, features], of the tokens and heads that attend here; nothing else may read them."""
        return qkv

    def after_attention(self, attended: Tensor) -> Tensor:
        """Return what attention gave, [B, S, H, D], as [B, S', H', D] of the tokens and heads that `o_proj` takes."""
        return attended

    def why_unlike(self, **arguments: Any) -> str | None:
        """Return why `attend` computes something else than the unfused forward; None: the same."""
        implementation = self.config._attn_implementation
        if has_sinks(self):
            if implementation != WITH_SINKS:
                return f"attn_implementation={implementation!r}"
            if sequences_of(arguments["position_embeddings"]) is None:  # `attend_packed` alone has sinks
                return "attention with sinks takes no attention_mask, no cache, and gives no weights"
            implementation = "sdpa"
        if not getattr(self, "is_causal", True):
            return "it was told not to be causal"
        if "cache" in self.native_arguments:  # else it is one of pages, which transformers' attention reads
            arguments.pop("cache", None)
        return why_unlike(implementation, arguments)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any) -> Tensor:
        """Attend from query [B, Hq, S, D] to key and value [B, Hkv, S', D]: [B, Hq, S, D]."""
        dropout = dropout_of(self) if self.training else 0.0
        return attend(query, key, value, attention_mask, dropout=dropout, scale=getattr(self, "scaling", None))

    def attend_packed(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Attend within each sequence, [B, Hq, S, D]; keys and values are [B, Hkv, S, D]."""
        dropout = dropout_of(self) if self.training else 0.0
        scale = getattr(self, "scaling", None)
        limit = self.floor_scale - 1 if self.is_tempered else getattr(self.config, "attention_chunk_size", None)
        if limit is not None and sequences.longest > limit:
            raise ValueError(
                f"a packed sequence has {sequences.longest} tokens, and {type(self).__name__} attends in chunks, or by "
                f"a temperature, above {limit}; cut the sequences, or pad them"
            )
        # where an attention has none of its own, transformers takes the model's
        window = getattr(self, "sliding_window", getattr(self.config, "sliding_window", None))
        sinks = self.sinks if has_sinks(self) else None
        return attend_packed(query, key, value, sequences, window=window, sinks=sinks, dropout=dropout, scale=scale)

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Run where `forward` does not cover a case."""
        return super().forward(*args, **kwargs)


class LatentAttention(FusedAttention):
    """Mixin of a self-attention whose heads are made of latents (DeepSeek V2, arXiv 2405.04434, section 2.1).

    The one product of its input gives a latent of the queries, or these themselves, one of keys and values, and the
    part of the keys that is rotated, which all heads share.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    q_a_layernorm: nn.Module
    q_b_proj: nn.Module
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Module

    def takes_places(self, places: int) -> bool:
        """As `FusedAttention.takes_places`."""
        return places == self.qk_rope_head_dim

    def why_unlike(self, **arguments: Any) -> str | None:
        """As `FusedAttention.why_unlike`."""
        if self.cache_in(arguments) is not None:
            return "a cache holds latents; give use_cache=False"
        return super().why_unlike(**arguments)

    def rotated(self, qkv: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, ...]:
        """As `FusedAttention.rotated`; v is [B, S, H, V]."""
        cos, sin = cast(tuple[Tensor, Tensor], angles)
        widths = self.kv_lora_rank, self.qk_rope_head_dim
        of_query, of_keys, k_part = qkv.split([qkv.shape[-1] - sum(widths), *widths], -1)
        if "q_b_proj" in self.part.of_latents:
            q = own_product(self.q_b_proj, self.q_a_layernorm(of_query))
        else:
            q = of_query.clone(memory_format=torch.contiguous_format)
        kv = own_product(self.kv_b_proj, self.kv_a_layernorm(of_keys))
        return latent_heads(q, kv, k_part, cos, sin, heads=q.shape[-1] // head_size(self), **self.form.pairs)


def unfused_calls(model: nn.Module) -> Counter[str]:
    """Count the fused attentions that ran as transformers wrote them for some calls in training, by the reason."""
    fused = (module for module in model.modules() if isinstance(module, FusedAttention))
    return Counter(reason for module in fused for reason in module.unfused_calls)


def head_norms(attention: nn.Module) -> list[Any]:
    """Return the norms of queries and of keys, each head's or all heads'; they may be one. Empty: there are none."""
    held = attention._modules.get
    both = held("qk_norm")
    norms = held("q_layernorm") or held("q_norm") or both, held("k_layernorm") or held("k_norm") or both
    if norms == (None, None):  # of most families, at every call
        return []
    found = (norm for norm in norms if norm is not None)
    return [norm if isinstance(norm, FusedNorm) else HeadNorms.of(norm) or norm for norm in found]

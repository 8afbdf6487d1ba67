"""Decoder layers with their pointwise parts fused around the products.

In place, by class: parameters, their names, hooks and `isinstance` stay as they were. A fused layer of LLaMA's computes

    y, h = norm(x)                      one kernel; h is x
    q, k, v = rotate(qkv product of y)  one product, one kernel
    y, h = norm(attention, h)           one kernel: residual, norm
    x = h + down(SwiGLU of the gate-up product of y)   in a mixture of experts each expert so, on its tokens

and every kernel delivers the amax of what it makes, so that the casts before FP8 products read their input once. The
products are those of FP8 layers, or of layers that stayed nn.Linear. Which families there are: `nn.fused.families`.
Each part is fused by itself, where it computes what its fused form does (`nn.fused.trials`); a layer of another
structure is what its class makes of its parts (`nn.fused.late_sums`). Where a case is not covered (returned attention
weights, another activation, layers of different kinds) that part runs as transformers wrote it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn

from fp8booster.nn.fused.attention import attend, attend_packed, attends_alike
from fp8booster.nn.fused.families import ATTENTION, WITH_SINKS, Part, has_sinks, is_attention, is_known, part_of
from fp8booster.nn.fused.late_sums import LateSum, made, parts_with_late_sums
from fp8booster.nn.fused.merged_layers import Merged, MergedLayers, MergedLinears
from fp8booster.nn.fused.packing import Sequences, let_pack, sequences_of
from fp8booster.nn.fused.pointwise import activate, activate_gated, layer_norm, rms_norm, rotate_heads, split_and_rotate
from fp8booster.nn.fused.trials import (
    Form,
    Norm,
    activation_kind,
    activation_name,
    cos_and_sin,
    dropout_of,
    form_of,
    head_size,
    heads_of_a_key,
    is_gated,
    norm_of,
)
from fp8booster.nn.linear.layer import FP8Layer, saves_in_8_bits
from fp8booster.nn.modules import cached_by_class, is_looked_at, members_of_made, run_with


class FusedPart(nn.Module):
    """Mixin of a part with linear layers of one input."""

    part: Part
    fp8_merged: Merged | None
    """None where there is one layer, whose product is that of all, and where they run one by one."""

    def merged_product(self, input: torch.Tensor) -> torch.Tensor | None:
        """What the merged layers make of an input; None: call the layers, which the part has now, one by one."""
        layers: list[Any] = list(map(self._modules.get, self.part.merged))
        if self.fp8_merged is None:
            if not self.training or torch.compiler.is_compiling():
                return None
            product = layers[0](input)
            # what is fused behind it may write over a product, but not over what a hook saw or an adapter may keep
            is_own = isinstance(layers[0], (nn.Linear, FP8Layer)) and not is_looked_at(layers[0])
            return product if is_own else product.clone()
        return self.fp8_merged(input) if self.fp8_merged.stands_for(*layers) else None

    @property
    def is_asked_to_save_in_8_bits(self) -> bool:
        """Whether what is fused behind the product saves so for backward what it reads."""
        if self.fp8_merged is None:
            return saves_in_8_bits([getattr(self, self.part.merged[0])])
        return self.fp8_merged.saves_in_8_bits

    @property
    def saves_in_8_bits(self) -> bool:
        """Whether it does, as far as it is known."""
        return self.is_asked_to_save_in_8_bits and (self.fp8_merged is None or self.fp8_merged.why_not_merged is None)


class FusedNorm(nn.Module):
    """Mixin of a norm."""

    weight: nn.Parameter
    computes: ClassVar[Norm]

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor | None = None,
        *,
        both: bool = False,
        encoded: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The norm of `hidden_states + residual`; with `both`, that sum too. `encoded` saves the sum in 8 bits."""
        centered, unit_offset, name, weighted = self.computes
        epsilon = getattr(self, name)
        weight: torch.Tensor = self.weight if weighted else hidden_states.new_ones(hidden_states.shape[-1])
        if weight.dim() > 1 and weight.shape != hidden_states.shape[-weight.dim() :]:
            shape = list(hidden_states.shape)
            raise ValueError(f"a norm with weights {list(weight.shape)} was given {shape}; give it those heads")
        if centered:
            bias = getattr(self, "bias", None)
            y, h = layer_norm(hidden_states, weight, bias, epsilon, residual, encoded=encoded)
        else:
            given = {"unit_offset": unit_offset, "encoded": encoded}
            y, h = rms_norm(hidden_states, weight, epsilon, residual, **given)
        return (y, h) if both else y


class MergedAttention(FusedPart):
    """Mixin of a self-attention as transformers wrote it, whose layers of one input are one product."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple:
        product = self.merged_product(hidden_states)
        if product is None:
            return super().forward(hidden_states, *args, **kwargs)
        return run_with(
            super().forward, self, self._projections(hidden_states, product), hidden_states, *args, **kwargs
        )

    def _projections(self, input: torch.Tensor, product: torch.Tensor) -> dict[str, Callable]:
        """What stands in for the merged layers: it gives their parts of the one product of their input."""
        names = self.part.merged
        layers = [getattr(self, name) for name in names]
        # of the product, not of the layers: ranks may hold parts of these
        whole = sum(layer.out_features for layer in layers)
        widths = [layer.out_features * product.shape[-1] // whole for layer in layers]
        return {
            name: lambda x, layer=layer, part=part: part if x is input else layer(x)
            for name, layer, part in zip(names, layers, product.split(widths, -1), strict=True)
        }


class FusedAttention(MergedAttention):
    """Mixin of a self-attention that PyTorch's SDPA computes; q and k may have norms, each head's or all heads'."""

    config: Any
    layer_idx: int
    floor_scale: int
    use_rope: bool
    sinks: torch.Tensor

    form: Form = Form()

    native_arguments: ClassVar[tuple[str, ...]]
    """Names of what the class's own forward takes after the hidden states."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As transformers', with one product for q, k and v."""
        arguments = dict(zip(self.native_arguments, args, strict=False)) | kwargs
        embeddings = arguments["position_embeddings"]
        sequences = sequences_of(embeddings)
        angles = cos_and_sin(embeddings, self.form.angles) if self.form.rotation.rotates else None
        is_alike = self.attends_alike(**arguments) and (angles is None or angles[0].shape[-1] <= head_size(self))
        if sequences is None and self.is_tempered:
            is_alike &= hidden_states.shape[1] < self.floor_scale and self.cache_in(arguments) is None
        qkv = self.merged_product(hidden_states) if is_alike else None
        if qkv is None and sequences is None:
            return self.forward_unfused(hidden_states, **arguments)
        if not is_alike:
            raise ValueError(
                "attention of packed sequences is causal, and gives no weights; "
                "leave out output_attentions, is_causal and the like, or pad the sequences"
            )
        if qkv is None:  # in evaluation, or with an adapter
            qkv = torch.cat([getattr(self, name)(hidden_states) for name in self.part.merged], -1)
        qkv = self.before_attention(qkv)
        # of the product, not of the input: ranks may hold heads, and parts of the sequence that it has gathered
        key_heads = self.key_heads_in(qkv)
        query, key, value = self.rotated(qkv, angles, key_heads)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        cache = self.cache_in(arguments)
        if cache is not None:
            key, value = self.cached(key, value, cache, arguments)
        if sequences is None:
            attended = self.attend(query, key, value, arguments.get("attention_mask"))
        elif key.shape[2] == query.shape[2]:
            attended = self.attend_packed(query, key, value, sequences)
        else:
            raise ValueError("packed sequences cannot go on from a cache; leave past_key_values out")
        output = getattr(self, self.part.output)(self.after_attention(attended.transpose(1, 2)).flatten(2))
        return (output, None, cache)[: self.form.outputs]

    def rotated(
        self, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor] | None, key_heads: int
    ) -> tuple[torch.Tensor, ...]:
        """q, k and v, [B, S, H, D], of which q and k have gone through their norms and were rotated.

        Args:
            qkv: [B, S, features].
            angles: cos and sin; None rotates nothing.
            key_heads: heads of keys in qkv.
        """
        query_heads, size = key_heads * heads_of_a_key(self), head_size(self)
        _, interleaved, interleaved_angles = self.form.rotation
        pairs = {"interleaved": interleaved, "interleaved_angles": interleaved_angles}
        norms = _head_norms(self)
        if angles is not None and not norms:
            cos, sin = angles
            groups = key_heads if self.form.grouped else 1
            return split_and_rotate(qkv, cos, sin, query_heads=query_heads, key_heads=key_heads, groups=groups, **pairs)
        *split, value = qkv.split([heads * size for heads in (query_heads, key_heads, key_heads)], -1)
        heads = [each.unflatten(-1, (-1, size)) for each in split]
        if norms:
            of_all = norms[0].computes.weighted and norms[0].weight.shape[-1] != size
            normal = [norm(each) for norm, each in zip(norms, split if of_all else heads, strict=True)]
            # what hooks saw is not written over
            normal = [each.clone() if is_looked_at(norm) else each for norm, each in zip(norms, normal, strict=True)]
            heads = [each.view(like.shape) for each, like in zip(normal, heads, strict=True)]
        query, key = heads
        if angles is not None:
            cos, sin = angles
            query, key = rotate_heads(query, key, cos, sin, **pairs)
        return query, key, value.unflatten(-1, (-1, size))

    @property
    def is_tempered(self) -> bool:
        """Whether queries from token `floor_scale` on are scaled by their place, as in LLaMA 4 (arXiv 2501.19399)."""
        return bool(getattr(self, "attn_temperature_tuning", False)) and not self.use_rope

    def cache_in(self, arguments: dict[str, Any]) -> Any:
        """The cache that a layer is given, if any; also in training, where `use_cache` was left on."""
        return next((arguments.get(name) for name in _CACHES if name in self.native_arguments), None)

    def cached(
        self, key: torch.Tensor, value: torch.Tensor, cache: Any, arguments: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [B, H, S, D], with those before them."""
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

    def key_heads_in(self, qkv: torch.Tensor) -> int:
        """Heads of keys in q, k and v side by side, [..., features]."""
        return qkv.shape[-1] // head_size(self) // (heads_of_a_key(self) + 2)

    def before_attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """q, k and v, [B, S, features], of the tokens and heads that attend here; nothing else may read them."""
        return qkv

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        """What attention gave, [B, S, H, D], as [B, S', H', D] of the tokens and heads that `o_proj` takes here."""
        return attended

    def attends_alike(self, **arguments: Any) -> bool:
        """Whether `attend` computes what the unfused forward does with these arguments."""
        implementation = self.config._attn_implementation
        if has_sinks(self):  # `attend_packed` alone has them
            is_told = sequences_of(arguments["position_embeddings"]) is not None
            implementation = "sdpa" if implementation == WITH_SINKS and is_told else "another"
        return attends_alike(implementation, arguments)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any) -> torch.Tensor:
        """The attention of query [B, Hq, S, D] to key and value [B, Hkv, S', D]: [B, Hq, S, D]."""
        dropout = dropout_of(self) if self.training else 0.0
        return attend(query, key, value, attention_mask, dropout=dropout, scale=getattr(self, "scaling", None))

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """The attention, [B, Hq, S, D], of each sequence to itself; keys and values are [B, Hkv, S, D]."""
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

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What runs where `forward` does not cover a case."""
        return super().forward(*args, **kwargs)


def _head_norms(attention: nn.Module) -> list[Any]:
    """The norms of queries and of keys, each head's or all heads'; they may be one. Empty where there are none."""
    both = [attention._modules.get("qk_norm")] * 2
    norms = [attention._modules.get(name, shared) for name, shared in zip(("q_norm", "k_norm"), both, strict=True)]
    return [norm for norm in norms if norm is not None]


_CACHES = ("past_key_values", "past_key_value", "layer_past")
"""What attentions call the cache that they are given."""


class FusedMLP(FusedPart):
    """Mixin of a feed-forward block as transformers wrote it, with a kernel for its activation."""

    activation: str
    """Its name in the block."""

    kind: str
    """What it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not self.training:
            return super().forward(x)
        fused = partial(activate, kind=self.kind, encoded=self.is_asked_to_save_in_8_bits)
        return run_with(super().forward, self, {self.activation: fused}, x)


class FusedGatedMLP(FusedMLP):
    """Mixin of a gated feed-forward block, or of an expert that is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As transformers', with one product for gate and up."""
        output = getattr(self, self.part.output)
        gate_up = self.merged_product(x)
        if gate_up is not None:
            return output(activate_gated(gate_up, self.kind, encoded=self.is_asked_to_save_in_8_bits))
        if self.fp8_merged is None:
            return super(FusedMLP, self).forward(x)
        # up first: then backward gives gradients in the order of the one product, which a rank may run whose expert has
        # other tokens; ZeRO adds up gradients of ranks in the order in which they come
        gate, up = (getattr(self, name) for name in self.part.merged)
        of_up = up(x)
        return output(getattr(self, self.activation)(gate(x)) * of_up)


class FusedDecoderLayer(nn.Module):
    """Mixin of a decoder layer: its norms make the sums that they read."""

    def norms(self) -> list[FusedNorm]:
        """Those that are fused."""
        return [each for each in self.children() if isinstance(each, FusedNorm)]

    @property
    def saves_in_8_bits(self) -> bool:
        """Whether its norms save so for backward what they read: where its attention has FP8 layers that do."""
        parts: Any = self._modules.values()
        attention = next(filter(is_attention, parts))
        return saves_in_8_bits(attention._modules.values())

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As transformers'."""
        if torch.compiler.is_compiling():  # the compiler sees sums and norms by itself
            return super().forward(hidden_states, *args, **kwargs)
        parts = parts_with_late_sums(self, FusedNorm, encoded=self.saves_in_8_bits)
        return made(run_with(super().forward, self, parts, LateSum(hidden_states), *args, **kwargs))


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
    # inner modules first: a layer is fused if it has norms that are
    for module in reversed(list(model.modules())):
        if not is_known(type(module)) or not (any(True for _ in module.parameters()) or _is_whole_norm(module)):
            continue
        part = part_of(module)
        if part is not None:
            _fuse(module, part.name, _mixin(module, part, replaced_attention))
        elif type(module).__name__.endswith("Norm"):
            _fuse(module, "norm", _norm_mixin(module))
        elif any(map(is_attention, module.children())):
            fused += _fuse_layer(module)
    for module in model.modules():
        if any(isinstance(part, FusedAttention) for part in module.modules()):
            let_pack(module)
    return fused


def mix(mixin: type[nn.Module], module: nn.Module) -> None:
    """Put a mixin before the class of a module of transformers', and merge the module's layers of one input."""
    if issubclass(mixin, FusedPart):
        part = cast(Part, part_of(module))
        layers = [getattr(module, name) for name in part.merged]
        merged = None
        if len(layers) > 1 and mixin is not FusedMLP:
            merged = MergedLayers(layers) if _in_fp8(layers) else MergedLinears(layers)
        vars(module).update(part=part, fp8_merged=merged)
    if issubclass(mixin, FusedMLP):
        name = cast(str, activation_name(module))
        vars(module).update(activation=name, kind=activation_kind(getattr(module, name)))
    module.__class__ = _mixed_class(mixin, type(module))


def unfused_parts(model: nn.Module) -> Counter[str]:
    """How many parts of decoder layers `fuse_blocks` left alone, by what they are and why."""
    return Counter(module.__dict__[_WHY_NOT] for module in model.modules() if _WHY_NOT in module.__dict__)


_WHY_NOT = "_fp8booster_unfused"


def _fuse(module: nn.Module, name: str, mixin: type[nn.Module] | str) -> None:
    """Fuse a module, or note why it is not."""
    if isinstance(mixin, str):
        module.__dict__[_WHY_NOT] = f"{name}: {mixin}"
    else:
        mix(mixin, module)


def _fuse_layer(layer: nn.Module) -> bool:
    """Whether a decoder layer could be fused, which now is."""
    if "forward" in vars(layer):
        layer.__dict__[_WHY_NOT] = f"residuals: {REPLACED}"
        return False
    for norm in layer.children():
        if type(norm) is nn.LayerNorm:
            _fuse(norm, "norm", _norm_mixin(norm))
    if any(isinstance(each, FusedNorm) for each in layer.children()):
        mix(FusedDecoderLayer, layer)
        return True
    return False


def _is_whole_norm(module: nn.Module) -> bool:
    """Whether a module without parameters is a norm that needs none."""
    computes = norm_of(type(module)) if type(module).__name__.endswith("Norm") else None
    return computes is not None and not computes.weighted


def _norm_mixin(norm: nn.Module) -> type[nn.Module] | str:
    """What a norm is fused by, or why it is not."""
    if "forward" in vars(norm):
        return REPLACED
    weight = getattr(norm, "weight", None)
    heads = () if weight is None else weight.shape[:-1]
    computes = (
        norm_of(type(norm)) if len(heads) < 2 and norm_of(type(norm), *heads[:1]) == norm_of(type(norm)) else None
    )
    if computes is not None and (weight is not None or not computes.weighted):
        return FusedNorm
    return f"{type(norm).__name__} has no fused form"


def _mixin(module: nn.Module, part: Part, replaced_attention: ReplacedAttention | None) -> type[nn.Module] | str:
    """What a part of a decoder layer is fused by, or why it is not."""
    layers = [getattr(module, name) for name in part.merged]
    if len(layers) > 1 and not _in_fp8(layers) and not all(type(layer) is nn.Linear for layer in layers):
        return f"{', '.join(part.merged)} are neither all FP8 layers nor all nn.Linear"
    if part.name == ATTENTION:
        return _attention_mixin(module, part, replaced_attention)
    if "forward" in vars(module):
        return REPLACED
    name = activation_name(module)
    activation = None if name is None else getattr(module, name)
    if activation is None or activation_kind(activation) is None:
        return f"its activation is {type(activation).__name__}"
    if is_gated(type(module), part):
        return FusedGatedMLP
    if len(layers) > 1:
        what = f"{type(module).__name__} computes something else than this version knows"
        vars(module)[_WHY_NOT] = f"{part.name} but for its activation: {what}"
    return FusedMLP


def _attention_mixin(
    attention: nn.Module, part: Part, replaced_attention: ReplacedAttention | None
) -> type[nn.Module] | str:
    """What an attention is fused by, or why it is not."""
    if "forward" in vars(attention):
        return REPLACED if replaced_attention is None else replaced_attention(attention)
    config: Any = attention.config
    kind = config._attn_implementation
    form = _form_of_fused(attention, part) if kind == (WITH_SINKS if has_sinks(attention) else "sdpa") else None
    if form is not None:
        vars(attention)["form"] = form
        return FusedAttention
    what = type(attention).__name__ if kind == "sdpa" else f"attn_implementation={kind!r}"
    if len(part.merged) == 1:
        return f"{what} has no fused form"
    vars(attention)[_WHY_NOT] = f"{part.name} but for its one product: {what} has no fused form"
    return MergedAttention


def _form_of_fused(attention: Any, part: Part) -> Form | None:
    """The form of an attention that `FusedAttention` may stand for; None: it may not."""
    norms = _head_norms(attention)
    if not hasattr(attention, "attention_dropout") or not all(isinstance(norm, FusedNorm) for norm in norms):
        return None
    return form_of(attention, part, _mixed_class(FusedAttention, type(attention)))


def _in_fp8(layers: list[nn.Module]) -> bool:
    return all(isinstance(layer, FP8Layer) for layer in layers)


@cached_by_class
def _mixed_class(mixin: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    members = {"__doc__": mixin.__doc__, **members_of_made(_mixed_class, mixin, original)}
    if issubclass(mixin, FusedNorm):
        members["computes"] = norm_of(original)
    if issubclass(mixin, FusedAttention):
        _, _, *names = inspect.signature(original.forward).parameters
        members["native_arguments"] = tuple(names)
    return type(f"Fused{original.__name__}", (mixin, original), members)

"""Decoder layers with their pointwise parts fused around the products.

In place, by class: parameters, their names, hooks and `isinstance` stay as they were. A fused layer of LLaMA's computes

    y, h = norm(x)                      one kernel; h is x
    q, k, v = rotate(qkv product of y)  one product, one kernel
    y, h = norm(attention, h)           one kernel: residual, norm
    x = h + down(SwiGLU of the gate-up product of y)   in a mixture of experts each expert so, on its tokens

and every kernel delivers the amax of what it makes, so that the casts before FP8 products read their input once. The
products are those of FP8 layers, or of layers that stayed nn.Linear. Which families there are: `nn.fused.families`.
Each part is fused by itself, where it computes what its fused form does (`nn.fused.trials`); a layer of another
structure is what its class makes of its parts (`nn.fused.lazy`). Where a case is not covered (returned attention
weights, another activation, layers of different kinds) that part runs as transformers wrote it.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8booster.config import FP8Config
from fp8booster.nn.fused.activations import activation_kind, activation_name
from fp8booster.nn.fused.attention_form import Form, form_of
from fp8booster.nn.fused.caches import make_no_cache_in_training
from fp8booster.nn.fused.families import ATTENTION, WITH_SINKS, Part, has_sinks, is_attention, is_known, part_of
from fp8booster.nn.fused.lazy import LazySum, made, parts_with_lazy_sums
from fp8booster.nn.fused.merged_layers import MergedLayers, MergedLinears
from fp8booster.nn.fused.norm import FusedNorm, HeadNorms
from fp8booster.nn.fused.packing import let_pack
from fp8booster.nn.fused.part import FusedGatedMLP, FusedMLP, FusedPart
from fp8booster.nn.fused.pointwise import Saving
from fp8booster.nn.fused.self_attention import FusedAttention, LatentAttention, MergedAttention, head_norms
from fp8booster.nn.fused.trials import is_gated, norm_of
from fp8booster.nn.linear.layer import FP8Layer, config_around, without_adapter
from fp8booster.nn.modules import change_class, mixed_class, run_with
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling.smooth_swiglu import ChannelFactors, SmoothSwiGLU


class FusedDecoderLayer(nn.Module):
    """Mixin of a decoder layer: its norms make the sums that they read."""

    name_prefix = "Fused"

    attention_name: str

    def norms(self) -> list[FusedNorm]:
        """Return its fused norms."""
        return [each for each in self.children() if isinstance(each, FusedNorm)]

    @property
    def fused_config(self) -> FP8Config | None:
        """The configuration of its norms, that of its attention's FP8 layers; None: there are none."""
        attention: Any = self._modules[self.attention_name]
        return config_around(attention._modules.values())

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the compiler sees sums and norms by itself
            return super().forward(hidden_states, *args, **kwargs)
        parts = parts_with_lazy_sums(self, FusedNorm, saving=Saving.of_norm(self.fused_config))
        return made(run_with(FusedDecoderLayer._as_written, self, parts, LazySum(hidden_states), *args, **kwargs))

    def _as_written(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


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
    inner_first = list(model.modules())[::-1]  # a layer is fused if it has norms that are
    for module in inner_first:
        # another stage of a pipeline may hold the parameters
        if not is_known(type(module)) or not (any(True for _ in module.parameters()) or _is_whole_norm(module)):
            continue
        part = part_of(module)
        if part is not None:
            _fuse(module, part.name, _mixin(module, part, replaced_attention))
        elif type(module).__name__.endswith("Norm"):
            _fuse(module, "norm", _norm_mixin(module))
        elif any(map(is_attention, module.children())):
            fused += _fuse_layer(module)
    _smooth(model)
    for module in inner_first:  # a wrapper looks for the packing of the model inside it
        if any(isinstance(part, FusedAttention) for part in module.modules()):
            let_pack(module)
        if any(isinstance(part, FusedDecoderLayer) for part in module.modules()):
            make_no_cache_in_training(module)
    return fused


def _smooth(model: nn.Module) -> None:
    """Give layers that read SwiGLU's output casts by channel, where their configuration asks for it."""
    asked = smoothed = False
    for module in model.modules():
        asked |= isinstance(module, FP8Layer) and isinstance(module.fp8_config.scaling, SmoothSwiGLU)
        if not (isinstance(module, FusedGatedMLP) and module.kind == "silu"):
            continue
        output = getattr(module, module.part.output)
        if isinstance(output, FP8Layer) and isinstance(output.fp8_config.scaling, SmoothSwiGLU):
            output.fp8_casts, smoothed = Casts(output.fp8_config, ChannelFactors), True
    if asked and not smoothed:
        warnings.warn(
            'FP8Config(scaling="smooth-swiglu") has no effect: no fused feed-forward block has SwiGLU before a layer '
            "in FP8; leave it out",
            stacklevel=3,
        )


def mix(mixin: type[nn.Module], module: nn.Module) -> None:
    """Put a mixin before the class of a module of transformers', and merge the module's layers of one input."""
    if issubclass(mixin, FusedPart):
        part = cast(Part, part_of(module))
        layers = _layers(module, part)
        merged = None
        # an ungated block's layers, or one that computes something else, are called as transformers wrote it
        if len(layers) > 1 and mixin is not FusedMLP:
            merged = MergedLayers(layers) if _in_fp8(layers) else MergedLinears(layers)
        vars(module).update(part=part, fp8_merged=merged)
    if issubclass(mixin, FusedAttention):
        vars(module)["unfused_calls"] = {}
    if issubclass(mixin, FusedMLP):
        vars(module)["activation"] = activation_name(module)
    if issubclass(mixin, FusedDecoderLayer):
        vars(module)["attention_name"] = next(name for name, each in module.named_children() if is_attention(each))
    change_class(module, mixed_class(mixin, type(module)))


def unfused_parts(model: nn.Module) -> Counter[str]:
    """Count the parts of decoder layers that are not fused, by what they are and why."""
    left_alone = Counter(module.__dict__[_WHY_NOT] for module in model.modules() if _WHY_NOT in module.__dict__)
    return left_alone + changed_parts(model)


def changed_parts(model: nn.Module) -> Counter[str]:
    """Count the parts that `fuse_blocks` fused and that run as transformers wrote them now, by name and reason."""
    found: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, (FusedMLP, FusedNorm, FusedAttention)) and (reason := module.why_not_now) is not None:
            found[f"{module.part.name if isinstance(module, FusedPart) else 'norm'}: {reason}"] += 1
    return found


_WHY_NOT = "_fp8booster_unfused"


def _fuse(module: nn.Module, name: str, mixin: type[nn.Module] | str) -> None:
    """Fuse a module, or note why it is not."""
    if isinstance(mixin, str):
        module.__dict__[_WHY_NOT] = f"{name}: {mixin}"
    else:
        mix(mixin, module)


def _fuse_layer(layer: nn.Module) -> bool:
    """Fuse a decoder layer if it has a fused norm, and tell whether it has."""
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
    """Tell whether a module without parameters is a norm that needs none."""
    computes = norm_of(type(module)) if type(module).__name__.endswith("Norm") else None
    return computes is not None and not computes.weighted


def _norm_mixin(norm: nn.Module) -> type[nn.Module] | str:
    """Return the mixin of a norm, or why it is not fused."""
    if "forward" in vars(norm):
        return REPLACED
    weight = getattr(norm, "weight", None)
    heads = () if weight is None else weight.shape[:-1]
    # it must compute the same with a weight for each head as with one for all
    computes = norm_of(type(norm), *heads) if len(heads) < 2 else None
    computes = computes if computes == norm_of(type(norm)) else None
    if computes is not None and (weight is not None or not computes.weighted):
        return FusedNorm
    return f"{type(norm).__name__} has no fused form"


def _mixin(module: nn.Module, part: Part, replaced_attention: ReplacedAttention | None) -> type[nn.Module] | str:
    """Return the mixin of a part of a decoder layer, or why it is not fused."""
    layers = _layers(module, part)
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
    if is_gated(type(module), part, cast(str, name)):
        return FusedGatedMLP
    if len(layers) > 1:
        what = f"{type(module).__name__} computes something else than this version knows"
        vars(module)[_WHY_NOT] = f"{part.name} but for its activation: {what}"
    return FusedMLP


def _attention_mixin(
    attention: nn.Module, part: Part, replaced_attention: ReplacedAttention | None
) -> type[nn.Module] | str:
    """Return the mixin of an attention, or why it is not fused."""
    if "forward" in vars(attention):
        return REPLACED if replaced_attention is None else replaced_attention(attention)
    config: Any = attention.config
    kind = config._attn_implementation
    mixin = LatentAttention if part.of_latents else FusedAttention
    norms_are_fused = all(isinstance(norm, (FusedNorm, HeadNorms)) for norm in head_norms(attention))
    form: Form | None = None
    is_kind = kind == (WITH_SINKS if has_sinks(attention) else "sdpa")
    if is_kind and norms_are_fused and hasattr(attention, "attention_dropout"):
        form = form_of(attention, part, mixed_class(mixin, type(attention)))
    if form is not None:
        vars(attention)["form"] = form
        return mixin
    what = type(attention).__name__ if kind == "sdpa" else f"attn_implementation={kind!r}"
    if len(part.merged) == 1:
        return f"{what} has no fused form"
    vars(attention)[_WHY_NOT] = f"{part.name} but for its one product: {what} has no fused form"
    return MergedAttention


def _layers(module: nn.Module, part: Part) -> list[Any]:
    """Return the layers of one input, without adapters of peft's around them."""
    return [without_adapter(getattr(module, name)) for name in part.merged]


def _in_fp8(layers: list[nn.Module]) -> bool:
    return all(isinstance(layer, FP8Layer) for layer in layers)

"""Choose the linear layers and experts of a model that compute in FP8, and remember why the others do not."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from fp8booster.config import FP8Config, all_but_vocabulary_heads, config_or_default
from fp8booster.kernels.alignment import aligned, multiple_for
from fp8booster.nn.adapters import follow_merges
from fp8booster.nn.experts.batched import BatchedExperts, are_batched, skip_scores_of_zero
from fp8booster.nn.experts.fp8_experts import FP8Experts, are_experts, why_not
from fp8booster.nn.experts.mixture import group_mixtures
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.graphs import forget_graphs
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, require_own_weights
from fp8booster.nn.linear.low_rank import low_rank_adapters
from fp8booster.nn.modules import require_module, unmixed, vocabulary_heads
from fp8booster.nn.sharing import share_inputs
from fp8booster.nn.weights.holder import FP8Module
from fp8booster.nn.weights.memory import is_lazy, without_large_transposes
from fp8booster.nn.weights.source import CachedWeight

PADDING_LIMIT = 1.125
"""A layer whose features, rounded up to multiples of 16 or 128, make its products larger than this stays in BF16."""

GATES = ("gate", "shared_expert_gate")
"""Names, besides experts, of what chooses a token's experts: a layer, or a module that holds layers."""

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Attributes of what holds experts, that tell how many there are."""

WITH_THE_FROZEN = "its product is made with that of the frozen FP8 layer that it adapts"
WHY_NOT_ROUTERS = "a router, where rounding would send tokens to other experts"

LEFT_OUT = "FP8Config.layers leaves it out"

USE_FP8_IS_OFF = "use_fp8 is off"

_KEPT = "_fp8booster_kept"
"""Attribute of a linear layer left alone, that holds a `Kept`."""

_OUTSIDE = "_fp8booster_outside"
"""Attribute of another module, that holds a `Kept` for each of its parameters that products may read, by name."""


class Kept(NamedTuple):
    """A weight that products read in high precision."""

    reason: str
    """Why they are not in FP8."""

    shape: tuple[int, ...]
    """(input, output features) of a linear layer; that of another module's parameter."""


Kinds = Mapping[type[nn.Module], type[FP8Layer]]
"""For each class of linear layers, the class that computes its products in FP8."""

KINDS: Kinds = {nn.Linear: FP8Linear}
"""Those of PyTorch; `known_kinds` adds those of libraries that are imported."""


def known_kinds(kinds: Kinds = KINDS) -> Kinds:
    """`kinds`, and transformers' Conv1D where a model may hold one: transformers need not be installed."""
    # no model can hold one before its module is imported, and importing transformers takes seconds
    if "transformers.pytorch_utils" not in sys.modules:
        return kinds
    from fp8booster.nn.linear.conv1d import FP8Conv1D

    return {FP8Conv1D.original: FP8Conv1D, **kinds}


def convert_to_fp8(
    model: nn.Module,
    config: FP8Config | None = None,
    *,
    kinds: Kinds = KINDS,
    kept: Mapping[int, str] = MappingProxyType({}),
) -> nn.Module:
    """Turn a model's linear layers, and experts in one parameter, into FP8 layers, in place.

    Parameters, their names, state dict keys and module identities stay as they are. Layers that stay in high precision
    are remembered with the reason, which `report` shows; where that is all of them, of which some were asked for, a
    warning reports it. Calling it again applies the new configuration, but to layers whose weight is kept in FP8 alone.

    Args:
        model: any module.
        config: which layers, and how; None is `FP8Config()`.
        kinds: which classes of layers, and what they turn into.
        kept: by their identities, layers and modules with experts that stay in high precision besides, and why.

    Returns:
        The model.

    Raises:
        ValueError: the model has no linear layers, or the configuration leaves out all of them, or asks for layers at
            the ends of a model that has no list of layers; `fully_shard` has sharded it.
        TypeError: the model is no module, or the configuration no FP8Config.
    """
    require_module(model)
    require_own_weights(model)
    config = config_or_default(config)
    config = without_large_transposes(config, model)
    forget_graphs(model)
    kinds = known_kinds(kinds)
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if (is_linear(module) or isinstance(module, tuple(kinds))) and not _is_elsewhere(module)
    ]
    by_role: dict[int, str] = {}
    heads, routers = heads_among(model, linears), _routers(model)
    if config.layers is all_but_vocabulary_heads:  # names alone do not tell what layers do in a model
        by_role = dict.fromkeys(heads, LEFT_OUT) | dict.fromkeys(routers, WHY_NOT_ROUTERS)
    if config.vocabulary_head:
        by_role = {layer: reason for layer, reason in by_role.items() if layer not in heads}
    if not config.always:
        by_role |= dict.fromkeys(low_rank_adapters(model), WITH_THE_FROZEN)
    at_the_ends = _at_the_ends(model, config.high_precision_ends)
    # last: ends are asked for by number, whatever role their layers have
    by_role |= at_the_ends
    for name, module in linears:
        # its weight is in FP8 alone, and another configuration could not be cast from it without a second rounding
        if isinstance(module, FrozenLayer):
            continue
        asked = config.vocabulary_head and id(module) in heads
        reason = by_role.get(id(module)) or kept.get(id(module)) or why_kept(name, module, config, kinds, asked=asked)
        if reason is None:
            # an earlier call with another configuration may have kept it
            module.__dict__.pop(_KEPT, None)
            kinds[_original(module)].convert_in_place(module, config)
        else:
            if unmixed(type(module)) in kinds.values():
                module.revert()
            module.__dict__[_KEPT] = Kept(reason, product_features(module, kinds))
    experts = _convert_experts(model, config, {**kept, **at_the_ends})
    _remember_outside(model, experts, routers)
    if not any(isinstance(module, FP8Module) for module in model.modules()):
        reasons = {kept_reason(module) for _, module in linears} | set(experts.values())
        _warn_of_nothing(sorted(reasons), {LEFT_OUT, WHY_NOT_ROUTERS, *at_the_ends.values()})
    for merged in merged_layers(model):  # an engine before may have given them, as the layers, what it gathers
        merged.fp8_weight = CachedWeight()
    group_mixtures(model, config.fused)
    skip_scores_of_zero(model, config.fused)
    follow_merges()
    share_inputs(model)
    return model


def _at_the_ends(model: nn.Module, count: int) -> dict[int, str]:
    """The identities of all modules in the first and last `count` layers of a model, with the reason."""
    if count == 0:
        return {}
    lists = list(_lists_of_layers(model))
    if not lists:
        raise ValueError(
            f"FP8Config.high_precision_ends is {count}, and the model holds no nn.ModuleList of layers; "
            "choose layers with FP8Config(layers=...)"
        )
    reason = f"one of the first or last {count} decoder layers" if count > 1 else "the first or last decoder layer"
    # a pipeline stage has the layers of other stages as shells, so all are counted
    return {
        id(module): f"{reason}, by FP8Config.high_precision_ends"
        for layers in lists
        for layer in [*layers[:count], *layers[-count:]]
        for module in layer.modules()
    }


def _lists_of_layers(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Those that hold linear layers, and are in no other such list, as lists of experts are."""
    if isinstance(module, nn.ModuleList) and len(module) > 1 and any(map(is_linear, module.modules())):
        yield module
        return
    for child in module.children():
        yield from _lists_of_layers(child)


def _convert_experts(model: nn.Module, config: FP8Config, by_role: Mapping[int, str]) -> dict[nn.Module, str]:
    """Turn experts that modules hold into FP8 ones; the modules that stay as they are, with the reason."""
    kept = {}
    for name, module in model.named_modules():
        kind = FP8Experts if are_experts(module) else BatchedExperts if are_batched(module) else None
        if kind is None:
            continue
        reason = by_role.get(id(module))
        reason = reason or (why_not(module, config) if config.layers(name, module) else LEFT_OUT)
        if reason is None:
            kind.convert_in_place(module, config)
            continue
        if isinstance(module, FP8Experts):
            module.revert()
        kept[module] = reason
    return kept


def heads_among(model: nn.Module, layers: Iterable[tuple[str, nn.Module]]) -> set[int]:
    """The identities of a model's vocabulary heads, by what it says itself and by the names of layers."""
    return vocabulary_heads(model) | {id(layer) for name, layer in layers if not all_but_vocabulary_heads(name, layer)}


def _warn_of_nothing(reasons: list[str], chosen: set[str]) -> None:
    """Tell that no layer computes in FP8: by a warning if no choice of layers would help, else by a ValueError.

    Args:
        reasons: why the layers do not.
        chosen: those among them that a configuration chose.
    """
    nothing = f"no layer of the model would compute in FP8: {'; '.join(reasons) or 'it has no linear layers'}. "
    if set(reasons) <= chosen:
        raise ValueError(f"{nothing}Train it without use_fp8, or choose layers with FP8Config(layers=...)")
    warnings.warn(f"{nothing}They compute in 16 bits", stacklevel=3)


def _routers(model: nn.Module) -> set[int]:
    """Return the identities of what chooses among experts, and of all inside it.

    That is what is called a router, and what lies next to experts and is called a gate or gives a number for each.
    """
    found: set[int] = set()
    for module in model.modules():
        counts = _counts_of_experts(module)
        for name, child in module.named_children():
            chooses = "router" in name.lower() or "Router" in type(child).__name__
            # experts may give as many numbers as there are of them
            if counts is not None and not _holds_experts(name, child):
                chooses = chooses or name in GATES or _scores(child, counts)
            if chooses:
                found.update(map(id, child.modules()))
    return found


def _counts_of_experts(module: nn.Module) -> set[int] | None:
    """Return how many experts the children of a module are or hold, by all that tells; None: they hold none."""
    holders = [child for name, child in module.named_children() if _holds_experts(name, child)]
    if not holders:
        return None
    told = {getattr(each, count, None) for each in (module, *holders) for count in _COUNTS}
    listed = {len(each) for each in holders if isinstance(each, (nn.ModuleList, nn.ModuleDict))}
    stacked = {len(value) for each in holders for value in each.parameters(recurse=False) if value.dim() == 3}
    return {count for count in told | listed | stacked if isinstance(count, int) and count > 1}


def _holds_experts(name: str, module: nn.Module) -> bool:
    named_so = "experts" in name or "Experts" in type(module).__name__
    return named_so and "shared" not in name and not is_linear(module)


def _scores(module: nn.Module, counts: Collection[int]) -> bool:
    """Tell whether a module next to experts gives a number for each, and not features as it reads, as a block does."""
    layers = [layer for layer in module.modules() if is_linear(layer) and not _is_elsewhere(layer)]
    sizes = [product_features(layer) for layer in layers]
    return any(outputs in counts for _, outputs in sizes) and all(outputs != sizes[0][0] for _, outputs in sizes)


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a linear layer: nn.Linear, an FP8 layer, or what looks like them."""
    weight = module._parameters.get("weight")
    return isinstance(module, (nn.Linear, FP8Layer, *known_kinds())) or (
        weight is not None
        and not is_lazy(weight)
        and weight.dim() == 2
        and hasattr(module, "in_features")
        and hasattr(module, "out_features")
    )


def linear_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every linear layer once, with its path in the model."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if (is_linear(module) or _KEPT in module.__dict__) and not _is_elsewhere(module)
    ]


def weights_outside(
    model: nn.Module, linears: Iterable[tuple[str, nn.Module]]
) -> list[tuple[str, nn.Module, str, Kept]]:
    """Return what products may read besides linear layers' weights: (module's path, module, parameter's name, why).

    Experts in one parameter, the input projection of `nn.MultiheadAttention`, convolutions, whatever has two or
    more dimensions larger than one. Not embeddings and norms, which multiply no matrices; their classes are known by
    name.
    """
    unknown = why_unknown(model)
    return [
        (path, module, name, outside)
        for path, module in _of_no_linear_layer(model, linears)
        for name, outside in (module.__dict__.get(_OUTSIDE) or _outside(module, unknown)).items()
    ]


def _of_no_linear_layer(model: nn.Module, linears: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once but linear layers and what is inside one, as parametrizations are."""
    inside = {id(part) for _, layer in linears for part in layer.modules()}
    return ((path, module) for path, module in model.named_modules() if id(module) not in inside)


def _outside(module: nn.Module, reason: str) -> dict[str, Kept]:
    if isinstance(module, FP8Experts):
        return {name: Kept(reason, tuple(getattr(module, name).shape)) for name in module.fp8_weights}
    name = type(module).__name__
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or "Embedding" in name or "Norm" in name:
        return {}
    return {
        name: Kept(reason, tuple(parameter.shape))
        for name, parameter in module._parameters.items()
        if isinstance(parameter, nn.Parameter)
        and not is_lazy(parameter)
        and sum(size > 1 for size in parameter.shape) > 1
    }


def _remember_outside(model: nn.Module, experts: Mapping[nn.Module, str], routers: Collection[int]) -> None:
    """Remember it as it is now: an engine may flatten parameters, or hold another shape between forwards.

    Args:
        experts: those that stay in high precision, with the reason.
        routers: the identities of what chooses among experts.
    """
    for _, module in _of_no_linear_layer(model, linear_layers(model)):
        reason = f"{type(module).__name__} has no FP8 form"
        if id(module) in routers:
            reason = WHY_NOT_ROUTERS
        elif isinstance(module, _ConvNd):
            reason = "a convolution"
        reason = experts.get(module, reason)
        module.__dict__.pop(_OUTSIDE, None)
        if outside := _outside(module, reason):
            module.__dict__[_OUTSIDE] = outside


def _is_elsewhere(module: nn.Module) -> bool:
    """Tell whether a layer is a shell, whose weight another pipeline stage holds."""
    return "weight" in module._parameters and module._parameters["weight"] is None


def why_kept(
    name: str, module: nn.Module, config: FP8Config, kinds: Kinds = KINDS, *, asked: bool = False
) -> str | None:
    """Return why a linear layer stays in high precision under a configuration, or None if it computes in FP8.

    `asked`: it was asked for, whatever `config.layers` says.
    """
    original = _original(module)
    if is_lazy(module._parameters.get("weight")):
        return "it has no size before its first batch; run the model once, and convert it then"
    if original not in kinds:
        if issubclass(original, nn.Linear):
            return f"{original.__name__} is a subclass of nn.Linear that may compute its product otherwise"
        return f"{original.__name__} has no FP8 form"
    if not asked and not config.layers(name, module):
        return LEFT_OUT
    if (reason := kinds[original].why_not(module)) is not None:
        return reason
    inputs, outputs = product_features(module, kinds)
    if inputs * outputs == 0:
        return "it has no weights"
    multiple = multiple_for(config.granularity)
    # FP8 products take multiples alone, and what is padded is multiplied too
    growth = aligned(inputs, multiple) * aligned(outputs, multiple) / (inputs * outputs)
    if growth > PADDING_LIMIT:
        return (
            f"{inputs} x {outputs} features, rounded up to multiples of {multiple}, would make its products "
            f"{growth:.2f} times larger"
        )
    return None


def remember_kept(module: nn.Module, reason: str) -> None:
    """Let the report list a module that multiplies by its `weight`, [outputs, inputs], in high precision, and why."""
    outputs, inputs = cast(torch.Tensor, module.weight).shape
    module.__dict__[_KEPT] = Kept(reason, (inputs, outputs))


def product_features(module: nn.Module, kinds: Kinds = KINDS) -> tuple[int, int]:
    """(input, output features) of a linear layer's products: of this rank's shard where its weight is sharded."""
    if isinstance(module, FP8Layer):
        return module.product_features
    if _KEPT in module.__dict__ and all(module.__dict__[_KEPT].shape):
        return module.__dict__[_KEPT].shape
    if is_lazy(module._parameters.get("weight")):
        return 0, cast(int, module.out_features)
    kind = known_kinds(kinds).get(unmixed(type(module)), FP8Linear)
    rows, columns = cast(torch.Tensor, module.weight).shape
    return (rows, columns) if kind.weight_is_transposed else (columns, rows)


def _original(module: nn.Module) -> type[nn.Module]:
    """The class of a layer before it computed in FP8."""
    cls = unmixed(type(module))
    return vars(cls).get("original", cls)


def kept_reason(module: nn.Module, unknown: str = USE_FP8_IS_OFF) -> str:
    """Return why a linear layer is not in FP8; `unknown`, as of `why_unknown`, where no conversion has noted it."""
    return module.__dict__[_KEPT].reason if _KEPT in module.__dict__ else unknown


def why_unknown(model: nn.Module) -> str:
    """Return why the conversion of a model, if any, has noted nothing of a part."""
    if any(isinstance(module, FP8Module) for module in model.modules()):
        return "it came after the model was converted"
    return USE_FP8_IS_OFF

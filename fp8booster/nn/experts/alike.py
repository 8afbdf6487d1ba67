"""Experts of one rank that are alike, whose layers can be computed together.

Anything may have changed since the last call: a module, a weight, a hook, a configuration. To look at each of hundreds
of layers takes Python longer than a GPU takes for them. So what a look saw is kept, and compared by identity with what
is there now, in loops that Python does not run itself. Only where something differs are the layers looked at again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8booster.nn.experts.gated import gate_up_down, why_not_gated
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear
from fp8booster.nn.modules import HOOKS, must_be_called
from fp8booster.nn.weights.engine import all_filled
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import WeightSource
from fp8booster.tensor import QuantizedMatrix

WHOLE_IN_LAYERS = "the weights are whole only while a layer runs"


class Seen(NamedTuple):
    """All that tells how experts compute, in flat lists: many small ones would be garbage to collect."""

    objects: list[Any]
    """Modules, classes, casts, sources of weights, dtypes: equal to themselves alone, which lists compare at once."""

    others: list[Any]
    """Weights, configurations and hooks, which may be equal to others."""

    @classmethod
    def of(cls, experts: Sequence[nn.Module]) -> Seen:
        """Look at the experts and the modules in them."""
        of_experts = list(map(_dict, experts))
        children = list(chain.from_iterable(map(_values, map(_children, of_experts))))
        if None in children:  # a module has one where it might have had a child
            children = [child for child in children if child is not None]
        of_children = list(map(_dict, children))
        held = [*of_experts, *of_children]
        # those without a cast, as activations, are told apart by their classes and hooks
        layers = [each for each in of_children if "fp8_casts" in each]
        parameters, casts = list(map(_parameters, layers)), list(map(_casts, layers))
        weights = list(map(dict.get, parameters, repeat("weight")))
        # most are empty; a dictionary tells whose hooks it has, and is written to
        hooks = list(filter(None, chain.from_iterable(map(map, _HOOKS, repeat(held)))))
        objects = [*map(type, experts), *map(type, children), *children, *casts, *map(len, hooks)]
        objects += map(dict.get, held, repeat("forward"))
        objects += map(dict.get, layers, repeat("fp8_weight"))  # frozen layers have none
        objects += map(getattr, weights, repeat("dtype"), repeat(None))
        # FSDP puts views of what it has gathered among the attributes
        others = [*weights, *map(dict.get, layers, repeat("weight"))]
        others += [*map(dict.get, parameters, repeat("bias")), *map(dict.get, of_experts, repeat("config"))]
        others += map(_config, casts)  # `Casts.under` writes it
        others += [*hooks, *chain.from_iterable(map(_values, hooks))]
        return cls(objects, others)

    def is_same(self, other: Seen) -> bool:
        """Tell whether another look saw the same objects."""
        return (
            self.objects == other.objects
            and len(self.others) == len(other.others)
            and all(map(is_, self.others, other.others))
        )


_dict, _place, _config = attrgetter("__dict__"), attrgetter("shape", "device"), attrgetter("config")
_children, _parameters = itemgetter("_modules"), itemgetter("_parameters")
_casts, _source = itemgetter("fp8_casts"), attrgetter("fp8_weight")
_HOOKS = tuple(map(itemgetter, HOOKS))
_values: Callable[[Any], Any] = dict.values


class Stack(NamedTuple):
    """The same layers of every expert, such as gates and ups, by expert."""

    layers: list[FP8Layer]
    weights: list[torch.Tensor]

    @classmethod
    def of(cls, layers: list[FP8Layer]) -> Stack:
        """Return layers with the weights that they hold now."""
        return cls(layers, list(map(_weight, layers)))


class Look(NamedTuple):
    """What was seen of experts."""

    reason: str | None
    """Why they cannot be computed together; None: they can, as far as modules and their attributes tell."""

    up: Stack
    down: Stack
    may_be_provided: bool
    """An engine may give some of the FP8 weights."""

    is_transient: bool
    """Some of the FP8 weights are whole only while their layers run."""

    of_each_kind: list[nn.Module]
    """An expert of each class, with each class of activations and each configuration."""

    places: list[tuple[torch.Size, torch.device]]
    """Of the weights, which stay the same objects where their memory is exchanged."""

    seen: Seen
    """What else this follows from."""

    def why_not(self) -> str | None:
        """Return why the experts, as they are, cannot be computed together; None: they can."""
        # classes and configurations can be written to, and stay the same objects
        return self.reason or next(filter(None, map(why_not_gated, self.of_each_kind)), None)

    def filled(self) -> list[QuantizedMatrix] | None:
        """Return what an engine made of each weight of up, and behind these of down, as `all_filled`."""
        if not self.may_be_provided:
            return None
        return all_filled(list(map(_source, self.up.layers + self.down.layers)), self.up.weights + self.down.weights)

    def is_provided(self) -> bool | None:
        """Tell whether an engine gives the FP8 copies of the weights now, asking for each; None: of some alone."""
        if not self.may_be_provided:
            return False
        layers, weights = self.up.layers + self.down.layers, self.up.weights + self.down.weights
        sources = list(map(_source, layers))
        if self.is_transient:
            held = {source.held is not None if isinstance(source, ReshardedWeight) else None for source in sources}
            return held.pop() if len(held) == 1 else None
        each = {source.is_provided([weight]) for source, weight in zip(sources, weights, strict=True)}
        return each.pop() if len(each) == 1 else None


class AlikeExperts:
    """Looks at experts, which are to be alike.

    Args:
        experts: modules that should compute `down(act_fn(gate(x)) * up(x))`.
    """

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        self._experts = experts
        self._last: Look | None = None

    def look(self) -> Look:
        """Return how the experts are now."""
        seen, last = Seen.of(self._experts), self._last
        if last is not None and last.seen.is_same(seen) and last.places == _places(last.up, last.down):
            return last
        self._last = None  # so that weights which are gone are freed
        found = _look_at(self._experts, seen)
        if found.reason is None:  # else it may follow from what is not looked at here
            self._last = found
        return found


def _places(*stacks: Stack) -> list[tuple[torch.Size, torch.device]]:
    return [place for stack in stacks for place in map(_place, stack.weights)]


def _look_at(experts: Sequence[nn.Module], seen: Seen) -> Look:
    kinds = {
        (type(expert), *map(type, expert.children()), id(vars(expert).get("config"))): expert for expert in experts
    }
    reason = _why_not_alike(experts)
    by_expert = [gate_up_down(expert) for expert in experts] if reason is None else []
    layers = [layer for gate, up, _ in by_expert for layer in (gate, up)], [down for _, _, down in by_expert]
    up, down = map(Stack.of, layers)
    sources = [layer.fp8_weight for layer in up.layers + down.layers]
    may_be_provided = any(type(source).is_provided is not WeightSource.is_provided for source in sources)
    is_transient = any(source.is_transient for source in sources)
    return Look(reason, up, down, may_be_provided, is_transient, list(kinds.values()), _places(up, down), seen)


def _why_not_alike(experts: Sequence[nn.Module]) -> str | None:
    """Return why experts cannot be computed together, by each of their modules."""
    first: list[FP8Layer] = []
    for expert in experts:
        if (reason := why_not_gated(expert)) is not None:
            return reason
        layers = gate_up_down(expert)
        first = first or layers
        for layer, same in zip(layers, first, strict=True):
            if (reason := _why_not_like(layer, same)) is not None:
                return reason
    return None


def _why_not_like(layer: nn.Module, same: FP8Layer) -> str | None:
    """Return why a layer cannot be computed together with the same one of the first expert, or None where it can."""
    if not isinstance(layer, FP8Layer) or layer.fp8_merges_by() is not FP8Linear:
        return f"{type(layer).__name__} has no grouped form"
    if layer.fp8_config is not same.fp8_config and layer.fp8_config != same.fp8_config:
        return "the layers' FP8Configs differ"
    if must_be_called(layer):
        return "a layer has hooks or a forward of its own, which must run"
    if getattr(layer, "bias", None) is not None:
        return "a layer has a bias"
    weight = _weight(layer)
    if weight is None or weight.dim() != 2:  # FSDP flattened it
        return WHOLE_IN_LAYERS
    if weight.dtype is not _weight(same).dtype:
        return "the experts' dtypes differ"
    return None if weight.shape == _weight(same).shape else "the experts' sizes differ"


def _weight(layer: FP8Layer) -> Any:
    held = vars(layer)
    return held.get("weight", held["_parameters"].get("weight"))

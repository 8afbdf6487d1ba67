"""One order on all ranks in which gradients enter ZeRO's buckets.

ZeRO fills its buckets as backward makes gradients, and what lies in one place of a bucket is added up over the ranks.
Whether layers run in FP8, and those such as q, k and v as one product, is chosen by a batch's number of tokens
(`nn.linear.speed_model`), of which ranks may have different ones. As one product they give their gradients in another
order than one by one, and in FP8 a layer gives weight and bias in another order than in 16 bits. So do experts that
are modules: one by one they give theirs from the last expert to the first, and grouped products give those of all
experts in an order that autograd does not promise. And a layer that is replayed from a CUDA graph gives all of its
gradients at once: each rank has captured what its own batches and its own host asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster.colossal.temporarily import temporarily
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.graphs.eager import eager_parts, modules_apart
from fp8booster.nn.graphs.static_call import parameters_of
from fp8booster.nn.modules import change_class, mixed_class, repeated_layers
from fp8booster.nn.weights.holder import FP8Module


def keep_one_order(optimizer: LowLevelZeroOptimizer, model: nn.Module) -> None:
    """Let gradients whose order a rank's batch may change enter the buckets together, in the order of their layers.

    Args:
        optimizer: made by a plugin; changes its class in place.
        model: what it trains, its layers converted and fused.
    """
    sets = _sets(model)
    if sets:
        change_class(optimizer, mixed_class(_InOneOrder, type(optimizer)))
        optimizer._sets = sets
        optimizer._set_of = {id(each): of_set for of_set in sets for part in of_set.parts for each in part}


@dataclass(eq=False)
class _Set:
    """Parameters whose gradients enter the buckets in one order, part by part."""

    parts: list[list[nn.Parameter]]
    """The gradients of a part enter together, behind those of the parts before it."""

    arrived: dict[int, int] = field(default_factory=dict)
    """The groups of those whose gradients are held back, by their ids."""

    entered: int = 0
    """How many parts have entered in this backward."""

    def begin_anew(self) -> None:
        """Forget what this backward has brought."""
        self.arrived, self.entered = {}, 0


def _sets(model: nn.Module) -> list[_Set]:
    """Return the trained parameters of what may be captured, of products of several layers, and of other layers."""
    sets = _sets_of_products(model)
    for layer in repeated_layers(model):
        sets = _with_whole(layer, sets)
    # a lone parameter has no order to keep, and holding it back would only delay its bucket
    return [each for each in sets if sum(map(len, each.parts)) > 1]


def _sets_of_products(model: nn.Module) -> list[_Set]:
    # from the last expert to the first, as one by one: there none waits for the others, and buckets free their memory
    by_parts: list[list[Iterable[nn.Module]]] = [
        [expert.modules() for expert in reversed(grouped.experts)] for grouped in grouped_experts(model)
    ]
    by_parts += [[merged.layers] for merged in merged_layers(model)]
    by_parts += [[(module,)] for module in model.modules() if isinstance(module, FP8Module)]
    # what runs as one before its layers: their weights are in the set of the product, and a layer's has what is left
    sets, taken = [], set()
    for modules_of_parts in by_parts:
        parts = []
        for modules in modules_of_parts:
            found = dict.fromkeys(each for module in modules for each in module.parameters(recurse=False))
            members = [each for each in found if each.requires_grad and each not in taken]
            taken.update(members)
            if members:
                parts.append(members)
        if parts:
            sets.append(_Set(parts))
    return sets


def _with_whole(layer: nn.Module, sets: list[_Set]) -> list[_Set]:
    """Return the sets with one of a layer's parameters in place of those of its products, but for what runs eagerly.

    Its parts come as the layer's own backward gives them, run without a graph: the last products first. So none waits
    there for another, but for vectors, as of norms, which come last.
    """
    apart = modules_apart(eager_parts(layer.modules()))
    held = parameters_of(module for module in layer.modules() if module not in apart)
    places = {each: number for number, each in enumerate(held)}
    inside = [each for each in sets if each.parts[0][0] in places]
    in_products = {each for of_set in inside for part in of_set.parts for each in part}
    elsewhere = {each for of_set in sets for part in of_set.parts for each in part} - in_products
    parts = [part for of_set in inside for part in of_set.parts]
    parts += [[each] for each in places if each.requires_grad and each not in in_products | elsewhere]
    # a parameter that layers share is in the set of the first
    parts.sort(key=lambda part: (all(each.dim() < 2 for each in part), -places.get(part[0], 0)))
    kept = [each for each in sets if each not in inside]
    return [*kept, _Set(parts)] if parts else kept


class _InOneOrder(LowLevelZeroOptimizer):
    """Mixin before a ZeRO optimizer, which holds gradients back until those of their set are there."""

    _sets: list[_Set]

    _set_of: dict[int, _Set]
    """By the id of a parameter."""

    _holds_back: bool = True

    def _add_to_bucket(self, param: nn.Parameter, group_id: int) -> None:
        of_set = self._set_of.get(id(param)) if self._holds_back else None
        if of_set is None:
            super()._add_to_bucket(param, group_id)
            return
        of_set.arrived[id(param)] = group_id
        while all(id(each) in of_set.arrived for each in of_set.parts[of_set.entered]):
            self._enter(of_set, of_set.parts[of_set.entered])
            of_set.entered = (of_set.entered + 1) % len(of_set.parts)

    def _enter(self, of_set: _Set, part: list[nn.Parameter]) -> None:
        for each in part:
            group_id = of_set.arrived.pop(id(each), None)
            if group_id is not None:
                super()._add_to_bucket(each, group_id)

    def _reduce_grad(self, partition_grad: bool) -> None:
        """As it is, behind sets of which some parameters got no gradient."""
        for of_set in self._sets:
            for part in of_set.parts if of_set.arrived else ():
                self._enter(of_set, part)
            of_set.begin_anew()
        # behind them: what is held back must be in a bucket when the last one is sent
        super()._reduce_grad(partition_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As it is; forgets what a backward that broke off held back."""
        super().zero_grad(set_to_none)
        for of_set in self._sets:
            # a gradient that was noted and is gone would let the next backward complete its set too early
            of_set.begin_anew()

    def _sync_grad(self) -> None:
        """As it is: it takes what gradients there are in the order of the parameters."""
        with temporarily(self, _holds_back=False):
            super()._sync_grad()

    def sync_dp_grads(self) -> None:
        """As it is: with pipelines the hybrid optimizer calls what `_sync_grad` is behind this class."""
        with temporarily(self, _holds_back=False):
            super().sync_dp_grads()

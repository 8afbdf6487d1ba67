"""One order on all ranks in which gradients enter ZeRO's buckets.

ZeRO fills its buckets as backward makes gradients, and what lies in one place of a bucket is added up over the ranks.
Whether layers run in FP8, and those such as q, k and v as one product, is chosen by a batch's number of tokens
(`nn.linear.speed_model`), of which ranks may have different ones. As one product they give their gradients in another
order than one by one, and in FP8 a layer gives weight and bias in another order than in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster.colossal.temporarily import temporarily
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import change_class, mixed_class


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
        optimizer._set_of = {id(each): of_set for of_set in sets for each in of_set.members}


@dataclass(eq=False)
class _Set:
    """Parameters whose gradients enter the buckets together, in their order."""

    members: list[nn.Parameter]

    arrived: dict[int, int] = field(default_factory=dict)
    """The groups of those whose gradients are held back, by their ids."""


def _sets(model: nn.Module) -> list[_Set]:
    """The trained parameters of layers that may run as one product, and those of each other FP8 layer or experts."""
    by_layer = [merged.layers for merged in merged_layers(model)]
    by_layer += [(module,) for module in model.modules() if isinstance(module, (FP8Layer, FP8Experts))]
    # merged layers first: their weights are in the set of the product, and a layer's own set has what is left
    sets, taken = [], set()
    for layers in by_layer:
        found = (each for layer in layers for each in layer.parameters(recurse=False))
        members = [each for each in found if each.requires_grad and each not in taken]
        taken.update(members)
        # a lone parameter has no order to keep, and holding it back would only delay its bucket
        if len(members) > 1:
            sets.append(_Set(members))
    return sets


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
        if len(of_set.arrived) == len(of_set.members):
            self._release(of_set)

    def _release(self, of_set: _Set) -> None:
        arrived, of_set.arrived = of_set.arrived, {}
        for each in of_set.members:
            if id(each) in arrived:
                super()._add_to_bucket(each, arrived[id(each)])

    def _reduce_grad(self, partition_grad: bool) -> None:
        """As it is, behind sets of which some parameters got no gradient."""
        for of_set in self._sets:
            if of_set.arrived:
                self._release(of_set)
        # behind them: what is held back must be in a bucket when the last one is sent
        super()._reduce_grad(partition_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As it is; forgets what a backward that broke off held back."""
        super().zero_grad(set_to_none)
        for of_set in self._sets:
            # a gradient that was noted and is gone would let the next backward complete its set too early
            of_set.arrived.clear()

    def _sync_grad(self) -> None:
        """As it is: it takes what gradients there are in the order of the parameters."""
        with temporarily(self, _holds_back=False):
            super()._sync_grad()

    def sync_dp_grads(self) -> None:
        """As it is: with pipelines the hybrid optimizer calls what `_sync_grad` is behind this class."""
        with temporarily(self, _holds_back=False):
            super().sync_dp_grads()

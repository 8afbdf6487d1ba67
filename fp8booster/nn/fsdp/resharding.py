"""FP8 layers and experts of a model whose units FSDP or FSDP2 gathers for forward, and again for backward."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.fused.causal_lm_loss import HeldHead, fused_head
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import change_class, mixed_class
from fp8booster.nn.weights.holder import weight_holders
from fp8booster.nn.weights.resharded import ReshardedWeight


def follow_units(model: nn.Module, unit_of: Mapping[nn.Module, nn.Module]) -> dict[nn.Module, list[MergedLayers]]:
    """Let FP8 layers and experts keep no FP8 weight between forward and backward, where their weights are shards.

    Args:
        model: converted to FP8 layers, and divided into units.
        unit_of: the unit of each module whose weights are sharded.

    Returns:
        The layers of each unit that are multiplied as one.
    """
    for module in unit_of:
        for holder in weight_holders(module).values():
            holder.fp8_weight = ReshardedWeight(holder.weight_is_transposed)
    for grouped in grouped_experts(model):
        units = {
            unit_of.get(layer)
            for expert in grouped.experts
            for layer in expert.modules()
            if isinstance(layer, FP8Layer)
        }
        # one unit of several experts is the block that runs them, or around it
        grouped.are_whole = len(units) == 1 and None not in units
    merged_in: dict[nn.Module, list[MergedLayers]] = {}
    for merged in merged_layers(model):
        of = {unit_of.get(layer) for layer in merged.layers}
        if len(of) > 1:
            merged.fp8_weight.refusal = "the weights are gathered in different units"
            continue
        (unit,) = of
        if unit is not None:
            merged.fp8_weight = ReshardedWeight()
            merged_in.setdefault(unit, []).append(merged)
    _hold_head(model, unit_of)
    return merged_in


def _hold_head(model: nn.Module, unit_of: Mapping[nn.Module, nn.Module]) -> None:
    """Let a fused loss read its head's weight where that is gathered for as long as the whole model runs."""
    head = fused_head(model)
    if head is None or head not in unit_of:
        return
    is_inside = any(head in module.children() for module in unit_of[head].modules())
    if is_inside and not isinstance(head, HeldHead):
        change_class(head, mixed_class(HeldHead, type(head)))

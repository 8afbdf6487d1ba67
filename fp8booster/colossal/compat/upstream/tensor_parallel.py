"""Patches of shardformer's layers under tensor and sequence parallelism."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements


@wrap(
    "shardformer.layer._operation:_ring_as_gather",
    "483",
    needed_when='sequence_parallelism_mode="ring"',
    only_if=lambda module: "input_tensors" in module._ring_as_gather.__code__.co_varnames,
)
def ring_gathers_what_others_hold(
    upstream: Callable,
    func: Any,
    input_to_gather: dict[str, torch.Tensor],
    input_local: dict[str, torch.Tensor],
    process_group: dist.ProcessGroup | None = None,
    gather_dim: int = 1,
    keep_item: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The ring of sequence parallelism gathers every rank's part of the input for the weight's gradient.

    Without it the gathered input holds this rank's part in other ranks' places, and weight gradients of column parallel
    layers are wrong.
    """
    inputs: list[dict[str, torch.Tensor]] = []

    def apply(**tensors: torch.Tensor) -> torch.Tensor:
        inputs.append({name: tensors[name].clone() for name in input_to_gather})
        return func(**tensors)

    output, _ = upstream(apply, input_to_gather, input_local, process_group, gather_dim, keep_item)
    # the first is this rank's, and the next ranks' follow
    ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
    in_order = [inputs[(index - rank) % ranks] for index in range(ranks)]
    return output, {name: torch.cat([part[name] for part in in_order], gather_dim) for name in input_to_gather}


@wrap(
    "shardformer.layer.linear:Linear1D_Row.__init__",
    "477",
    needed_when='sequence_parallelism_mode is "split_gather" or "ring", and a row parallel layer has a bias',
)
def biases_along_a_sequence_are_added_up(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The bias of a row parallel layer, which each rank adds to its part of the sequence, gets the whole gradient.

    Without it each rank trains its copy by the tokens that it holds, and the copies diverge.
    """
    from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp

    upstream(self, *args, **kwargs)
    if self.bias is not None and is_share_sp_tp(self.seq_parallel_mode):
        SeqParallelUtils.marked_as_sp_partial_derived_param(self.bias)


wrap(
    "shardformer.layer.qkv_fused_linear:FusedLinear1D_Row.__init__ GPT2FusedLinearConv1D_Row.__init__",
    "521,1086",
    needed_when='sequence_parallelism_mode is "split_gather" or "ring", as in GPT-2, whose layers have biases',
    name="biases_of_fused_layers_are_added_up",
)(biases_along_a_sequence_are_added_up)


@patch("shardformer.layer.normalization", "333,275", needed_when="enable_fused_normalization and apex is not installed")
def norms_are_fused_where_apex_is(module: ModuleType, replacements: Replacements) -> None:
    """`enable_fused_normalization` without apex keeps the model's norms, marked for sequence parallelism as they must.

    Without it: TypeError: 'NoneType' object is not callable, NameError: FusedLayerNormWithHook, or norms whose
    gradients the ranks of split_gather do not add up.
    """
    for fused, plain in (("FusedRMSNorm", module.RMSNorm), ("FusedLayerNorm", module.LayerNorm)):
        if getattr(module, f"{fused}WithHook", None) is None:
            replacements.set(getattr(module, fused), "from_native_module", staticmethod(plain.from_native_module))

"""Gradients of `FullyShardedDataParallel` (FSDP1) in FP8.

    model = FullyShardedDataParallel(model)
    fp8booster.comm.reduce_flat_fsdp(model)

A unit's flat gradient is reduce-scattered, each value rounded once; where ranks hold the same shards, as in hybrid
sharding, the shards are then averaged over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fp8booster.comm.encoding import DEFAULT, Encoding, Options
from fp8booster.comm.reductions import all_reduce, reduce_scatter_tensor


@dataclass(frozen=True, kw_only=True)
class FlatFSDPState:
    """What FSDP hands to `flat_fsdp_hook`."""

    group: dist.ProcessGroup | None
    """The ranks that a gradient is spread over, or averaged over where it is not sharded; None is all."""

    replicas: dist.ProcessGroup | None = None
    """The ranks that hold the same shard; None where there are none."""

    encoding: Encoding = DEFAULT
    """Format and scales on the wire."""

    min_bytes: int | None = None
    """The smallest gradient that is sent in FP8; None takes `threshold.MINIMUM_BYTES`."""


def flat_fsdp_hook(state: FlatFSDPState, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Average a unit's gradient over the ranks, in FP8.

    Args:
        state: settings.
        gradient: the whole, padded gradient; averaged in place where there is no shard.
        shard: written: this rank's part.
    """
    how: Options = {"encoding": state.encoding, "min_bytes": state.min_bytes}
    if shard is None:
        all_reduce(gradient, dist.ReduceOp.AVG, state.group, **how)
        return
    reduce_scatter_tensor(shard, gradient, dist.ReduceOp.AVG, state.group, **how)
    if state.replicas is not None:
        all_reduce(shard, dist.ReduceOp.AVG, state.replicas, **how)


def reduce_flat_fsdp(model: nn.Module, *, encoding: Encoding = DEFAULT, min_bytes: int | None = None) -> None:
    """Let every unit of a model that FSDP1 wrapped reduce its gradients in FP8; before its first forward.

    Args:
        model: wrapped in FullyShardedDataParallel, or holding wrapped modules.
        encoding, min_bytes: as for the collectives.

    Raises:
        ValueError: no module is wrapped.
    """
    units = FullyShardedDataParallel.fsdp_modules(model)
    if not units:
        raise ValueError(
            "no module of the model is wrapped; wrap it in torch.distributed.fsdp.FullyShardedDataParallel first"
        )
    for unit in units:
        # not by `register_comm_hook`: it refuses hybrid sharding, where a hook has a second group to average over
        unit._comm_hook = flat_fsdp_hook
        unit._comm_hook_state = FlatFSDPState(
            group=unit.process_group,
            replicas=getattr(unit, "_inter_node_pg", None),
            encoding=encoding,
            min_bytes=min_bytes,
        )

"""FSDP in FP8, through its own extension points.

    model = FullyShardedDataParallel(model)     # FSDP1: its gradients
    fp8booster.comm.reduce_flat_fsdp(model)

    fully_shard(model)                          # FSDP2: its parameters and gradients
    fp8booster.comm.compress_fsdp(model)

FSDP1 has a hook for a unit's flat gradient. It is reduce-scattered, each value rounded once; where ranks hold the same
shards, as in hybrid sharding, the shards are then averaged over them. FSDP2 has, in
torch.distributed.fsdp._fully_shard._fsdp_api, an `AllGather` and a `ReduceScatter`, each of which allocates its buffers
and is called in place of the plain collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from fp8booster.comm.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from fp8booster.comm.encoding import DEFAULT, Encoding, Options
from fp8booster.comm.threshold import Op


@dataclass(frozen=True, kw_only=True)
class FlatFSDPState:
    """Settings that FSDP1 hands to `flat_fsdp_hook`."""

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
        # the shard alone goes to the replicas, as a rule between nodes: a fraction of the gradient's bytes
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


class Buffers:
    """Buffers of FSDP2's collectives, from the caching allocator."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make memory for what is sent or received."""
        return torch.empty(*size, dtype=dtype, device=device)


class _FP8Comm(Buffers):
    """Settings of FSDP2's collectives.

    Args:
        how: the settings.
    """

    def __init__(self, how: Options) -> None:
        self._how = how


class FP8AllGather(_FP8Comm, AllGather):
    """Gathers parameters in FP8: every rank computes with rounded ones, and updates the exact shard that it keeps."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gather parameters by `all_gather_into_tensor` of `fp8booster.comm`."""
        return all_gather_into_tensor(output_tensor, input_tensor, group, async_op, **self._how)


class FP8ReduceScatter(_FP8Comm, ReduceScatter):
    """Reduces gradients in FP8, each rounded once."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Op, async_op: bool = False
    ) -> Work | None:
        """Reduce gradients by `reduce_scatter_tensor` of `fp8booster.comm`."""
        return reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op, **self._how)


def compress_fsdp(
    model: nn.Module,
    *,
    gather: bool = True,
    reduce: bool = True,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> None:
    """Let every module of `model` that FSDP2's `fully_shard` was called on communicate in FP8.

    Args:
        model: with `fully_shard` already applied.
        gather: send parameters in FP8. Parameters that need every bit, such as norms, are best given a
            `fully_shard` of their own and left out here.
        reduce: send gradients in FP8.
        encoding, min_bytes: as for the collectives.

    Raises:
        ValueError: `fully_shard` was called on no module of `model`.
    """
    units = fsdp_units(model)
    if not units:
        raise ValueError("no module of the model is sharded; call torch.distributed.fsdp.fully_shard on it first")
    how: Options = {"encoding": encoding, "min_bytes": min_bytes}
    for unit in units:
        if gather:
            unit.set_custom_all_gather(FP8AllGather(how))
        if reduce:
            unit.set_custom_reduce_scatter(FP8ReduceScatter(how))


def fsdp_units(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2's `fully_shard` was called on."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]

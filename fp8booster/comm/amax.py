"""Amaxes that ranks agree on, for tensors that are spread over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster.kernels.scales import amaxes_of


def agree_on_amax(
    shards: Sequence[Tensor], group: dist.ProcessGroup | None, known: Sequence[Tensor | None] | None = None
) -> Tensor:
    """The largest magnitude of each tensor over all its shards: float32 [len(shards)], from one reduction.

    A NaN counts as infinity, since a MAX reduction drops NaN; both make the scale NaN.

    Args:
        shards: this rank's part of each tensor, in the same order on every rank; empty where it has none of it.
        group: the ranks that hold the parts.
        known: the largest magnitude of each shard, float32 [], or None where it is to be found. None: all are.
    """
    amaxes = torch.stack(_with_those_unknown(known or [None] * len(shards), shards))
    amaxes.nan_to_num_(nan=float("inf"), posinf=float("inf"))
    dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
    return amaxes


def _with_those_unknown(known: Sequence[Tensor | None], shards: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude of each shard, float32 []."""
    found = iter(amaxes_of([shard for shard, amax in zip(shards, known, strict=True) if amax is None]))
    return [next(found) if amax is None else amax for amax in known]


def largest_of_each(amaxes: Tensor, first: Tensor) -> Tensor:
    """The amaxes [N] of weights, where those that share a scale have the largest of theirs.

    Args:
        amaxes: float32 [N].
        first: int64 [N], for each weight the place of the first one that it shares a scale with, or its own.
    """
    return torch.zeros_like(amaxes).scatter_reduce(0, first, amaxes, "amax")[first]

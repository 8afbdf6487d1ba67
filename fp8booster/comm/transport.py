"""Memory for messages, and the collectives that carry bytes, or amaxes in FP32, as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.threshold import Op, ReduceOp, ranks_of
from fp8booster.kernels.scales import amaxes_of


def new_message(like: Tensor, size: int) -> Tensor:
    """Return memory for a message of `size` bytes, on the device of a tensor."""
    return torch.empty(size, dtype=torch.uint8, device=like.device)


def flat(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor's values in one dimension, without a copy.

    Raises:
        ValueError: they do not lie one after the other.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{what} is not contiguous; call .contiguous() on it first")
    # collectives write to it in place, which autograd refuses of a leaf
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def require_multiple(large: Tensor, small: Tensor, ranks: int, large_name: str, small_name: str) -> None:
    """Raise ValueError where `large` has not `ranks` times as many values as `small`."""
    if large.numel() != ranks * small.numel():
        raise ValueError(
            f"{large_name} has {large.numel()} values and {small_name} {small.numel()}; {large_name} must have "
            f"{ranks} times as many, once for each rank"
        )


def require_one_for_each(tensors: Sequence[Tensor], ranks: int, what: str) -> None:
    """Raise ValueError where a list has not one tensor for each rank of a group that this one is in."""
    if ranks > 0 and len(tensors) != ranks:
        raise ValueError(f"{what} has {len(tensors)} tensors; give {ranks}, one for each rank")


_SUFFIXES = ("single", "single") if hasattr(dist, "all_gather_single") else ("into_tensor", "tensor")
_NAMES = {name: f"{name}_{suffix}" for name, suffix in zip(("all_gather", "reduce_scatter"), _SUFFIXES, strict=True)}


def one_tensor(collective: str, module: ModuleType = dist) -> Callable[..., Any]:
    """Return `all_gather` or `reduce_scatter` of one tensor, by the name that torch 2.13 gives it or that of before.

    Args:
        collective: the name without its end.
        module: `torch.distributed`, or `fp8booster.comm`, which has both names.
    """
    return getattr(module, _NAMES[collective])  # at each call, for it may be wrapped to count it


def add_and_scatter(
    output: Tensor, input: Tensor, op: Op, group: dist.ProcessGroup | None, asynchronous: bool = False
) -> Work | None:
    """Write this rank's part of the sum or mean over ranks, which the backend adds in the tensors' dtype."""
    if divides(op, input, ranks_of(group)):
        # a copy: the caller's input is not to change
        input, op = input.detach() / ranks_of(group), ReduceOp.SUM
    return one_tensor("reduce_scatter")(output, input, op, group, asynchronous)


def divides(op: Op, tensor: Tensor, ranks: int) -> bool:
    """Tell whether a plain mean is a sum of values that ranks have divided: gloo, on the CPU, knows none.

    Divided first, as NCCL does, for the sum of what has a finite mean may overflow.
    """
    return op == ReduceOp.AVG and tensor.is_floating_point() and not tensor.is_cuda and ranks > 0


def gather_bytes(
    message: Tensor, own: Tensor, group: dist.ProcessGroup | None, asynchronous: bool = False
) -> Work | None:
    """Gather every rank's bytes into `message`, as they are; the caller counts them."""
    return one_tensor("all_gather")(message, own, group, asynchronous)


def gather_many(messages: Sequence[tuple[Tensor, Tensor]], group: dist.ProcessGroup | None) -> list[Work]:
    """Begin to gather (message, own part) for several messages, by one launch of NCCL; wait for all it returns."""
    if ranks_of(group) == 1:  # such as that of the ranks which hold the same experts
        for message, own in messages:
            # one rank's part is the whole message, which callers mostly write in its place
            if message.data_ptr() != own.data_ptr():
                message.copy_(own)
        return []
    # gloo joins no calls
    if not messages[0][0].is_cuda:
        begun = [gather_bytes(message, own, group, asynchronous=True) for message, own in messages]
        return [work for work in begun if work is not None]
    with dist._coalescing_manager(group, async_ops=True) as coalesced:
        for message, own in messages:
            gather_bytes(message, own, group, asynchronous=True)
    return [coalesced]


def agree_on_amax(
    shards: Sequence[Tensor], group: dist.ProcessGroup | None, known: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Return the largest magnitude of each tensor over all its shards: float32 [len(shards)], by one reduction.

    Args:
        shards: this rank's part of each tensor, in the same order on every rank; empty where it has none of it.
        group: the ranks that hold the parts.
        known: the largest magnitude of each shard, float32 [], or None where it is to be found. None: all are.
    """
    known = known or [None] * len(shards)
    # one call for all that are not known: each by itself would cost a launch
    found = iter(amaxes_of([shard for shard, amax in zip(shards, known, strict=True) if amax is None]))
    amaxes = torch.stack([next(found) if amax is None else amax for amax in known])
    # a MAX reduction drops NaN; an infinite amax makes the scale NaN as well
    amaxes.nan_to_num_(nan=float("inf"), posinf=float("inf"))
    if ranks_of(group) > 1:
        dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
    return amaxes


def largest_of_each(amaxes: Tensor, first: Tensor) -> Tensor:
    """Return the amaxes [N] of weights, where those that share a scale have the largest of theirs.

    Args:
        amaxes: float32 [N].
        first: int64 [N], for each weight the place of the first one that it shares a scale with, or its own.
    """
    # no amax is below zero, so the zeros that it begins with are never the largest
    return torch.zeros_like(amaxes).scatter_reduce(0, first, amaxes, "amax")[first]

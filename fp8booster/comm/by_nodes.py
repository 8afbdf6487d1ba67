"""Reductions by nodes: ranks of a node add in the tensors' dtype, and ranks of one place in their nodes in FP8.

A reduction in FP8 is an all-to-all, of which a node sends the more the more ranks it has. By nodes a rank exchanges a
share of its node's sum with one rank of each other node, and what leaves a node does not grow with its ranks.

A call runs so where `fp8booster doctor --nodes` measured that it takes the least time of the three forms, and where the
group has as many ranks, two or more, on each of several nodes. Which ranks share a node is agreed with the thresholds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster.comm.links import BY_NODES, REDUCTIONS, Links
from fp8booster.comm.threshold import Op, nodes_of, ranks_of
from fp8booster.comm.transport import add_and_scatter, gather_bytes
from fp8booster.kernels.message_layout import side_by_side


class Schedule(NamedTuple):
    """The groups that a reduction goes through: one in which all exchange FP8, or two by nodes."""

    between: dist.ProcessGroup
    """Ranks that exchange FP8: all, or those of one place in their nodes."""

    inside: dist.ProcessGroup | None = None
    """Ranks of this node, which add first; None: no rank does."""

    order: Sequence[int] = ()
    """Ranks of the whole group, the first of each node, then the second of each, and so on."""

    def share_of(self, values: Tensor, count: int, op: Op) -> Tensor:
        """Return this rank's share of its node's values [N], padded to `count`; the values where no rank adds."""
        if self.inside is None:
            return values
        if values.numel() < count:
            values = torch.cat([values, values.new_zeros(count - values.numel())])
        return _share_of_sum(values, op, self.inside)

    def share_of_parts(self, tensors: Sequence[Tensor], op: Op) -> Sequence[Tensor]:
        """Return by nodes this rank's share of tensors that hold a part for each rank: those for its place [N]."""
        rows = side_by_side(tensors, len(self.order)).view(len(self.order), -1)
        # no index on the device: to copy it there makes the host wait
        return [_share_of_sum(torch.cat([rows[rank] for rank in self.order]), op, self.inside)]

    def share_of_message(self, message: Tensor, size: int) -> Tensor:
        """Return the part of a message [bytes] with this rank's share, of `size` bytes."""
        return message if self.inside is None else message.narrow(0, self.inside.rank() * size, size)

    def gather(self, message: Tensor, share: Tensor, own: Tensor, asynchronous: bool) -> dist.Work | None:
        """Gather this rank's piece of its share, which lies in the message, and then the shares of its node."""
        work = gather_bytes(share, own, self.between, asynchronous and self.inside is None)
        return work if self.inside is None else gather_bytes(message, share, self.inside, asynchronous)


def _share_of_sum(values: Tensor, op: Op, group: dist.ProcessGroup | None) -> Tensor:
    share = values.new_empty(values.numel() // ranks_of(group))
    add_and_scatter(share, values, op, group)
    return share


def always_by_nodes(device: torch.device, first_ranks: Sequence[int]) -> Links:
    """Return thresholds by which every reduction between nodes runs by nodes, to measure it (`use_links`).

    Args:
        device: of the tensors.
        first_ranks: for each rank the first one of its node, alike on all ranks.
    """
    return Links("none while they are measured", device.type, {BY_NODES: dict.fromkeys(REDUCTIONS, 0)}, first_ranks)


def schedule_of(group: dist.ProcessGroup) -> Schedule:
    """Return the schedule by nodes of a group that has such; its first call makes the groups, on all of its ranks."""
    found = _schedules.get(group)
    if found is None:
        nodes, rank, backend = nodes_of(group), dist.get_rank(), dist.get_backend_config(group)
        (node,) = (node for node in nodes if rank in node)
        inside, between = (
            # known to its ranks alone: those of other groups make no such call
            dist.new_group(ranks, backend=backend, use_local_synchronization=True)
            for ranks in (node, [each[node.index(rank)] for each in nodes])
        )
        order = [dist.get_group_rank(group, rank) for place in zip(*nodes, strict=True) for rank in place]
        found = _schedules[group] = Schedule(between, inside, order)
    return found


_schedules: weakref.WeakKeyDictionary[dist.ProcessGroup, Schedule] = weakref.WeakKeyDictionary()

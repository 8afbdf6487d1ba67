"""Decides which calls go uncompressed, and why.

A message in FP8 costs two passes over memory and a kernel's launch for each. Below some size that takes longer than the
bytes it saves, and the plain collective runs instead. That size is measured (`links`) or else estimated. Every rank
must decide alike, so the decision uses only what all ranks of a call know: the size that they share, the dtype, the
group.
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster import formats
from fp8booster.comm.links import (
    BETWEEN_NODES,
    BY_NODES,
    ESTIMATED,
    INSIDE_A_NODE,
    NEVER,
    Links,
    agree_on_links,
    own_node,
)

ON_THE_CPU = "on the CPU"

MINIMUM_BYTES = {INSIDE_A_NODE: 64 * 2**20, BETWEEN_NODES: 2**20, ON_THE_CPU: 2**10}
"""The payload from which FP8 is sent where nothing was measured, by a group's slowest link.

In bytes of the plain collective's larger side.

Inside a node (NVLink): the smallest of the sizes in benchmarks/results/h200 at which the median time in FP8 is under
NCCL's in BF16 among 4 H200 (collectives-4; at 64 MiB that rests with the host's launches, which took longer in
collectives-4-one-sided, where FP8 gains from 256 MiB on). Between nodes (tens of GB/s a GPU; not measured): where the
bytes saved outweigh two kernel launches. On the CPU, where bytes are saved and not time: where scales and padding stay
under a tenth of the message.

An all-to-all of uneven parts has none: its sizes may differ by rank, so one rank cannot tell what the others decide. It
goes in 16 bits only where no size was measured to gain. Give it `min_bytes` where they do not.
"""

Group = dist.ProcessGroup | None
"""None is all ranks."""

Op = dist.ReduceOp | dist.ReduceOp.RedOpType
ReduceOp = dist.ReduceOp

_ADDING = (ReduceOp.SUM, ReduceOp.AVG)


def uncompressed_reason(
    name: str,
    tensor: Tensor,
    payload: int,
    group: dist.ProcessGroup | None,
    min_bytes: int | None,
    op: Op = ReduceOp.SUM,
    *,
    alike: bool = True,
) -> str | None:
    """Return the reason for which a call goes uncompressed, or None where it is sent in FP8.

    Args:
        name: the collective, or "send".
        tensor: one of the collective's tensors.
        payload: bytes of its larger side.
        group: of the collective.
        min_bytes: the smallest payload to send in FP8; None takes `minimum_bytes`.
        op: its reduction.
        alike: all ranks have the same payload. Where they need not, nothing is too small by itself.
    """
    ranks = ranks_of(group)
    if ranks < 1:
        return "not a member of the group"
    if ranks == 1:
        return "one rank"
    if tensor.dtype not in formats.HIGH_PRECISION:
        return str(tensor.dtype).removeprefix("torch.")
    if op not in _ADDING:
        return f"reduction {getattr(op, 'name', 'with a factor')}"
    # ranks with a part send it in FP8, and one that has none must not differ from them
    if payload == 0 and alike:
        return "empty"
    if min_bytes is None:
        min_bytes = minimum_bytes(name, tensor.device, group)
        if min_bytes == NEVER:
            return "no gain measured"
        if not alike:
            return None
    return "small" if payload < min_bytes else None


def minimum_bytes(name: str, device: torch.device, group: dist.ProcessGroup | None) -> int:
    """Return the payload from which a collective of a group goes in FP8; `links.NEVER` where no size gains."""
    measured = links_in_use()
    if measured.device:
        least = measured.find(device, topology(group), name)
        if least is not None:
            return least
    return MINIMUM_BYTES[ON_THE_CPU if device.type == "cpu" else topology(group)]


def gains_by_nodes(name: str, device: torch.device, payload: int, group: dist.ProcessGroup | None) -> bool:
    """Tell whether a reduction of a group was measured to take the least time by nodes (`comm.by_nodes`)."""
    measured = links_in_use()
    if not measured.device:
        return False
    least = measured.find(device, BY_NODES, name)
    return least is not None and payload >= least and bool(nodes_of(group))


def use_links(links: Links | None = None) -> Links:
    """Take the thresholds of the file, where it is of this machine and these ranks. All ranks call it.

    Each process group of all ranks takes them once. A file of other conditions, or a damaged one, is not used: `source`
    and a warning of rank 0 give the reason.

    Args:
        links: what to take in place of the file's, alike on all ranks.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    # one rank sends nothing, and a planned run's ranks are not there
    if world is None or world.size() < 2 or dist.get_backend(world) == "fake":
        return ESTIMATED
    if links is not None:
        _in_use[world] = links
    elif world not in _in_use:
        _in_use[world] = agree_on_links(world)
    return _in_use[world]


def links_in_use() -> Links:
    """Return what `use_links` took for the process group of now."""
    world = dist.group.WORLD if dist.is_available() else None
    return ESTIMATED if world is None else _in_use.get(world, ESTIMATED)


_in_use: weakref.WeakKeyDictionary[dist.ProcessGroup, Links] = weakref.WeakKeyDictionary()


def group_or_all(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return a group, or that of all ranks for None.

    Raises:
        ValueError: there are no process groups yet.
    """
    found = group or dist.group.WORLD
    if found is None:
        raise ValueError("torch.distributed has no process group; call torch.distributed.init_process_group first")
    return found


def ranks_of(group: dist.ProcessGroup | None) -> int:
    """`torch.distributed.get_world_size`, without its look-ups where a group is given."""
    return group.size() if isinstance(group, dist.ProcessGroup) else dist.get_world_size(group)


def topology(group: dist.ProcessGroup | None) -> str:
    """Return the class of a group's slowest link."""
    group = group_or_all(group)
    found = _topologies.get(group)
    if found is None:
        found = _topologies[group] = _topology(dist.get_process_group_ranks(group))
    return found


_topologies: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()
"""By the group, not by its name and ranks, which another may have later under other launchers' variables."""


def _topology(ranks: list[int]) -> str:
    # nodes may have different numbers of ranks, so each rank looks at its own: what members of one group find is the
    # same
    first, here = own_node()
    return INSIDE_A_NODE if all(first <= each < first + here for each in ranks) else BETWEEN_NODES


def nodes_of(group: dist.ProcessGroup | None) -> list[list[int]]:
    """Return a group's ranks by node, or none unless there are two nodes or more, of as many ranks, two or more."""
    # outside of a group torch gives a marker in its place
    if not isinstance(group, dist.ProcessGroup):
        return []
    if group not in _nodes:
        first_of = links_in_use().first_ranks
        by_node: dict[int, list[int]] = {}
        for rank in sorted(dist.get_process_group_ranks(group)):
            by_node.setdefault(first_of[rank], []).append(rank)
        nodes = list(by_node.values())
        even = len(nodes) > 1 and len(nodes[0]) > 1 and len({len(node) for node in nodes}) == 1
        world = dist.group.WORLD
        # a communicator that is bound to its device is divided by all ranks of the world, which are not here
        divided = world is not None and world.bound_device_id is not None and group.size() < world.size()
        _nodes[group] = nodes if even and not divided else []
    return _nodes[group]


_nodes: weakref.WeakKeyDictionary[dist.ProcessGroup, list[list[int]]] = weakref.WeakKeyDictionary()

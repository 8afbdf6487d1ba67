from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import call, threshold
from fp8booster.comm.threshold import BETWEEN_NODES, INSIDE_A_NODE, MINIMUM_BYTES, ON_THE_CPU, ONE_SIDED, minimum_bytes
from tests.distributed import run_ranks


def topologies() -> dict[str, str]:
    found = {}
    pairs = {"0 1": dist.new_group([0, 1]), "1 2": dist.new_group([1, 2]), "2 3": dist.new_group([2, 3])}
    gpu = torch.device("cuda", 0)
    for nodes in ((2, 2), (4,), (1, 3), None):
        if nodes is None:
            os.environ.pop("LOCAL_WORLD_SIZE")
        else:
            places = [(place, size) for size in nodes for place in range(size)]
            place, size = places[dist.get_rank()]
            os.environ |= {"LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": str(size)}
        threshold._topologies.clear()
        found[f"{nodes}: all"] = threshold.topology(gpu, None)
        for name, group in pairs.items():
            if dist.get_rank() in dist.get_process_group_ranks(group):
                found[f"{nodes}: {name}"] = threshold.topology(gpu, group)
    found["cpu"] = threshold.topology(torch.device("cpu"), None)
    return found


def test_a_group_inside_a_node_is_told_from_one_between_nodes() -> None:
    found = {}
    for rank in run_ranks(topologies, 4):
        for name, topology in rank.items():
            assert found.setdefault(name, topology) == topology  # all ranks must decide alike
    assert found == {
        "(2, 2): all": BETWEEN_NODES,
        "(2, 2): 0 1": INSIDE_A_NODE,
        "(2, 2): 1 2": BETWEEN_NODES,
        "(2, 2): 2 3": INSIDE_A_NODE,
        "(4,): all": INSIDE_A_NODE,
        "(4,): 0 1": INSIDE_A_NODE,
        "(4,): 1 2": INSIDE_A_NODE,
        "(4,): 2 3": INSIDE_A_NODE,
        "(1, 3): all": BETWEEN_NODES,
        "(1, 3): 0 1": BETWEEN_NODES,
        "(1, 3): 1 2": INSIDE_A_NODE,
        "(1, 3): 2 3": INSIDE_A_NODE,
        "None: all": BETWEEN_NODES,
        "None: 0 1": BETWEEN_NODES,
        "None: 1 2": BETWEEN_NODES,
        "None: 2 3": BETWEEN_NODES,
        "cpu": ON_THE_CPU,
    }


READ_FROM_PEERS = {"all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"}
SENT = READ_FROM_PEERS | {"all_gather", "broadcast", "send"}


@pytest.mark.parametrize("way", MINIMUM_BYTES)
def test_every_collective_whose_ranks_share_a_size_has_a_threshold(way: str) -> None:
    assert set(MINIMUM_BYTES[way]) == (READ_FROM_PEERS if way == ONE_SIDED else SENT)
    assert all(minimum > 0 for minimum in MINIMUM_BYTES[way].values())


def numbers_taken() -> dict[tuple[str, str, bool], bool]:
    """Whether the right one is taken from a table without two equal numbers."""
    numbers = iter(range(1, 100))
    table = {way: {name: next(numbers) for name in names} for way, names in MINIMUM_BYTES.items()}
    with patch.dict(MINIMUM_BYTES, table):
        return {
            (name, device, one_sided): minimum_bytes(name, torch.device(device), None, one_sided=one_sided)
            == table[ONE_SIDED if one_sided else INSIDE_A_NODE if device == "cuda" else ON_THE_CPU][name]
            for device, one_sided in (("cuda", True), ("cuda", False), ("cpu", False))
            for name in READ_FROM_PEERS
        }


class Peer:
    """A mailbox of a group on the CPU, that counts what goes by it."""

    capacity = 10_000

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: self.calls.append(name)


def by_one_sided_thresholds() -> tuple[list[str], dict[str, dict[str, int]]]:
    """What goes one-sided and what uncompressed, under a table by which FP8 never pays but by one-sided reads."""
    peer = Peer()

    def fits(group: object, tensor: torch.Tensor, size: int) -> Peer | None:
        return peer if size <= peer.capacity else None

    never = dict.fromkeys(SENT, 2**40)
    smallest = {"all_reduce": 1000, "reduce_scatter_tensor": 2000, "all_gather_into_tensor": 3000}
    table = dict.fromkeys(MINIMUM_BYTES, never) | {ONE_SIDED: smallest | {"all_to_all_single": 4000}}
    comm.reset_statistics()
    with patch.dict(MINIMUM_BYTES, table), patch.object(call, "mailbox_of", fits):
        for nbytes in (992, 1992, 2992, 3992, 4000, 80_000):  # the last does not fit
            large, small = torch.ones(nbytes // 4), torch.ones(nbytes // 8)
            comm.all_reduce(large)
            comm.reduce_scatter_tensor(small, large[: 2 * small.numel()])
            comm.reduce_scatter_coalesced(small, [large[: 2 * small.numel()]])
            comm.all_gather_into_tensor(large[: 2 * small.numel()], small)
            comm.all_to_all_single(torch.empty_like(large), large)
            comm.all_to_all_single(torch.empty(2), torch.ones(2), [1, 1], [1, 1])  # may differ: not one-sided
    rows = comm.statistics().rows
    return peer.calls, {name: dict(row.uncompressed) for name, row in rows.items()}


def reasons() -> list[str | None]:
    values = torch.ones(100)
    sum_, max_ = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    smallest = MINIMUM_BYTES[ON_THE_CPU]["all_reduce"]
    alone = dist.new_subgroups(1)[0]
    return [
        threshold.uncompressed_reason("all_reduce", values, smallest, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest - 1, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, 100, None, 101, sum_),
        threshold.uncompressed_reason("all_reduce", values, 100, None, 100, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest, None, None, max_),
        threshold.uncompressed_reason("all_reduce", values.double(), smallest, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest, alone, None, sum_),
        threshold.uncompressed_reason("broadcast", values, 0, None, 0),
        threshold.uncompressed_reason("all_to_all_single", values, 4, None, None),
        threshold.uncompressed_reason("all_to_all_single", values, 0, None, None, alike=False),
        threshold.uncompressed_reason("all_to_all_single", values, 4, None, None, alike=False),
        threshold.uncompressed_reason("all_to_all_single", values, 4, None, 5, alike=False),
    ]


def decisions() -> dict[str, Any]:
    return {each.__name__: each() for each in (reasons, numbers_taken, by_one_sided_thresholds)}


@functools.cache
def decided() -> list[dict[str, Any]]:
    """What each of two ranks decided."""
    return run_ranks(decisions, 2)


def test_each_way_has_numbers_of_its_own() -> None:
    for found in decided():
        assert len(found["numbers_taken"]) == 3 * len(READ_FROM_PEERS)
        assert all(found["numbers_taken"].values())


def test_one_sided_reads_have_thresholds_of_their_own_where_the_message_fits() -> None:
    for found in decided():
        calls, uncompressed = found["by_one_sided_thresholds"]
        assert Counter(calls) == {"all_reduce": 4, "reduce_scatter": 6, "all_gather": 2, "all_to_all": 1}
        assert uncompressed == {
            "all_reduce": {"small": 2},
            "reduce_scatter_tensor": {"small": 6},
            "all_gather_into_tensor": {"small": 4},
            "all_to_all_single": {"small": 5},
        }


def test_reasons() -> None:
    for found in decided():
        assert found["reasons"] == [
            None,
            "small",
            "small",
            None,
            "reduction MAX",
            "float64",
            "one rank",
            "empty",
            "small",
            None,
            None,
            "small",
        ]

from __future__ import annotations

import functools
import os
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fp8booster.comm import threshold
from fp8booster.comm.threshold import BETWEEN_NODES, INSIDE_A_NODE, MINIMUM_BYTES, ON_THE_CPU, minimum_bytes
from tests.distributed import run_ranks


def topologies() -> dict[str, str]:
    found = {}
    pairs = {"0 1": dist.new_group([0, 1]), "1 2": dist.new_group([1, 2]), "2 3": dist.new_group([2, 3])}
    for nodes in ((2, 2), (4,), (1, 3), None):
        if nodes is None:
            os.environ.pop("LOCAL_WORLD_SIZE")
        else:
            places = [(place, size) for size in nodes for place in range(size)]
            place, size = places[dist.get_rank()]
            os.environ |= {"LOCAL_RANK": str(place), "LOCAL_WORLD_SIZE": str(size)}
        threshold._topologies.clear()
        found[f"{nodes}: all"] = threshold.topology(None)
        for name, group in pairs.items():
            if dist.get_rank() in dist.get_process_group_ranks(group):
                found[f"{nodes}: {name}"] = threshold.topology(group)
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
    }


def numbers_taken() -> list[int]:
    """The numbers of a GPU's link inside a node and of the CPU's."""
    with patch.dict(MINIMUM_BYTES, {INSIDE_A_NODE: 1, BETWEEN_NODES: 2, ON_THE_CPU: 3}):
        return [minimum_bytes("all_reduce", torch.device(device), None) for device in ("cuda", "cpu")]


def reasons() -> list[str | None]:
    values = torch.ones(100)
    sum_, max_ = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    smallest = MINIMUM_BYTES[ON_THE_CPU]
    alone = dist.new_subgroups(1)[0]
    return [
        threshold.uncompressed_reason("all_reduce", values, smallest, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest - 1, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, 100, None, 101, sum_),
        threshold.uncompressed_reason("all_reduce", values, 100, None, 100, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest, None, None, max_),
        threshold.uncompressed_reason("all_reduce", values.double(), smallest, None, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, smallest, alone, None, sum_),
        threshold.uncompressed_reason("all_reduce", values, 0, None, 0),
        threshold.uncompressed_reason("all_reduce", values, 4, None, None),
        threshold.uncompressed_reason("all_reduce", values, 0, None, None, alike=False),
        threshold.uncompressed_reason("all_reduce", values, 4, None, None, alike=False),
        threshold.uncompressed_reason("all_reduce", values, 4, None, 5, alike=False),
    ]


def decisions() -> dict[str, Any]:
    return {each.__name__: each() for each in (reasons, numbers_taken)}


@functools.cache
def decided() -> list[dict[str, Any]]:
    """What each of two ranks decided."""
    return run_ranks(decisions, 2)


def test_each_link_has_a_number_of_its_own() -> None:
    for found in decided():
        assert found["numbers_taken"] == [1, 3]


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

from __future__ import annotations

import functools
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fp8booster.comm import threshold
from fp8booster.comm.threshold import BETWEEN_NODES, INSIDE_A_NODE, MINIMUM_BYTES, ON_THE_CPU, minimum_bytes
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


SENT = {
    "all_reduce",
    "reduce_scatter_tensor",
    "all_gather_into_tensor",
    "all_to_all_single",
    "all_gather",
    "broadcast",
    "send",
}


@pytest.mark.parametrize("way", MINIMUM_BYTES)
def test_every_collective_whose_ranks_share_a_size_has_a_threshold(way: str) -> None:
    assert set(MINIMUM_BYTES[way]) == SENT
    assert all(minimum > 0 for minimum in MINIMUM_BYTES[way].values())


def numbers_taken() -> dict[tuple[str, str], bool]:
    """Whether the right one is taken from a table without two equal numbers."""
    numbers = iter(range(1, 100))
    table = {way: {name: next(numbers) for name in names} for way, names in MINIMUM_BYTES.items()}
    with patch.dict(MINIMUM_BYTES, table):
        return {
            (name, device): minimum_bytes(name, torch.device(device), None)
            == table[INSIDE_A_NODE if device == "cuda" else ON_THE_CPU][name]
            for device in ("cuda", "cpu")
            for name in SENT
        }


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
    return {each.__name__: each() for each in (reasons, numbers_taken)}


@functools.cache
def decided() -> list[dict[str, Any]]:
    """What each of two ranks decided."""
    return run_ranks(decisions, 2)


def test_each_way_has_numbers_of_its_own() -> None:
    for found in decided():
        assert len(found["numbers_taken"]) == 2 * len(SENT)
        assert all(found["numbers_taken"].values())


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

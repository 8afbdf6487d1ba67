from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from fp8booster.comm import threshold
from fp8booster.comm.threshold import BETWEEN_NODES, COLLECTIVES, INSIDE_A_NODE, MINIMUM_BYTES, ON_THE_CPU
from tests.distributed import run_ranks


def topologies() -> dict[str, str]:
    found = {}
    pairs = {"0 1": dist.new_group([0, 1]), "1 2": dist.new_group([1, 2]), "2 3": dist.new_group([2, 3])}
    gpu = torch.device("cuda", 0)
    for per_node in ("2", "4", None):
        if per_node is None:
            os.environ.pop("LOCAL_WORLD_SIZE")
        else:
            os.environ["LOCAL_WORLD_SIZE"] = per_node
        threshold._topology.cache_clear()
        found[f"{per_node}: all"] = threshold.topology(gpu, None)
        for name, group in pairs.items():
            if dist.get_rank() in dist.get_process_group_ranks(group):
                found[f"{per_node}: {name}"] = threshold.topology(gpu, group)
    found["cpu"] = threshold.topology(torch.device("cpu"), None)
    return found


def test_a_group_inside_a_node_is_told_from_one_between_nodes() -> None:
    found = {}
    for rank in run_ranks(topologies, 4):
        for name, topology in rank.items():
            assert found.setdefault(name, topology) == topology  # all ranks must decide alike
    assert found == {
        "2: all": BETWEEN_NODES,
        "2: 0 1": INSIDE_A_NODE,
        "2: 1 2": BETWEEN_NODES,
        "2: 2 3": INSIDE_A_NODE,
        "4: all": INSIDE_A_NODE,
        "4: 0 1": INSIDE_A_NODE,
        "4: 1 2": INSIDE_A_NODE,
        "4: 2 3": INSIDE_A_NODE,
        "None: all": BETWEEN_NODES,
        "None: 0 1": BETWEEN_NODES,
        "None: 1 2": BETWEEN_NODES,
        "None: 2 3": BETWEEN_NODES,
        "cpu": ON_THE_CPU,
    }


@pytest.mark.parametrize("topology", MINIMUM_BYTES)
def test_every_collective_whose_ranks_share_a_size_has_a_threshold(topology: str) -> None:
    assert set(MINIMUM_BYTES[topology]) == set(COLLECTIVES)
    assert all(minimum > 0 for minimum in MINIMUM_BYTES[topology].values())


def reasons() -> list[str | None]:
    values = torch.ones(100)
    sum_, max_ = dist.ReduceOp.SUM, dist.ReduceOp.MAX
    smallest = MINIMUM_BYTES[ON_THE_CPU]["all_reduce"]
    alone = dist.new_subgroups(1)[0]
    return [
        threshold.why_plain("all_reduce", values, smallest, None, None, sum_),
        threshold.why_plain("all_reduce", values, smallest - 1, None, None, sum_),
        threshold.why_plain("all_reduce", values, 100, None, 101, sum_),
        threshold.why_plain("all_reduce", values, 100, None, 100, sum_),
        threshold.why_plain("all_reduce", values, smallest, None, None, max_),
        threshold.why_plain("all_reduce", values.double(), smallest, None, None, sum_),
        threshold.why_plain("all_reduce", values, smallest, alone, None, sum_),
        threshold.why_plain("broadcast", values, 0, None, 0),
        threshold.why_plain("all_to_all_single", values, 0, None, None),
        threshold.why_plain("all_to_all_single", values, 4, None, None),
    ]


def test_reasons() -> None:
    for found in run_ranks(reasons, 2):
        assert found == [
            None,
            "small",
            "small",
            None,
            "reduction MAX",
            "float64",
            "one rank",
            "empty",
            None,
            None,
        ]

"""Collectives by nodes compute what others do, on ranks that are told to be two nodes of two."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.node_bytes import ByNodes, error_of
from fp8booster import comm
from tests.distributed import ranks


@ranks(4)
def test_collectives_by_nodes_compute_what_others_do() -> None:
    by_nodes = ByNodes(per_node=2, count=4096)
    total = by_nodes.values.float()
    dist.all_reduce(total)
    found = by_nodes.all_reduce()
    assert error_of(found, total) < 0.05
    first = found.clone()
    dist.broadcast(first, 0)
    assert torch.equal(found, first)
    rank = dist.get_rank()
    assert error_of(by_nodes.reduce_scatter(), total[1024 * rank : 1024 * (rank + 1)]) < 0.05
    whole = torch.empty(4096)
    dist.all_gather_into_tensor(whole, by_nodes.values[:1024].float())
    assert error_of(by_nodes.all_gather(), whole) < 0.05
    # between nodes alone something is in FP8, of half the values
    assert comm.statistics()["all_reduce"].raw_bytes == 2 * 2048

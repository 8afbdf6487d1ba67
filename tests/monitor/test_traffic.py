from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster.monitor.traffic import bytes_sent, count_traffic
from tests.distributed import run_ranks


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_reduce", 150),
        ("all_reduce_coalesced", 150),
        ("reduce", 75),
        ("broadcast", 75),
        ("reduce_scatter", 75),
        ("reduce_scatter_tensor", 75),
        ("all_gather", 300),
        ("all_gather_into_tensor", 300),
        ("all_to_all", 75),
        ("all_to_all_single", 75),
        ("scatter", 75),
        ("send", 100),
        ("isend", 100),
    ],
)
def test_bytes_that_a_rank_sends_of_a_payload_of_100_among_4(name, sent):
    assert bytes_sent(name, 100, 4) == sent


def _exchange() -> dict[str, list[tuple[str, str, int, int, int]]]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    ones, half = torch.ones(8), torch.ones(8, dtype=torch.bfloat16)
    original = dist.all_reduce
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    with count_traffic() as outer:
        dist.all_reduce(ones, group=dist.group.WORLD)
        with count_traffic() as inner:
            dist.reduce_scatter_tensor(output=torch.empty(4), input=ones)
            dist.all_gather_into_tensor(torch.empty(16, dtype=torch.bfloat16), half)
            dist.all_gather([torch.empty(8), torch.empty(8)], ones)
            dist.all_to_all_single(torch.empty(8), ones, async_op=True).wait()
            dist.broadcast(ones, 0)
            pair = [dist.P2POp(dist.isend, half, other), dist.P2POp(dist.irecv, torch.empty_like(half), other)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()
            if rank == 0:
                dist.send(ones, 1)
            else:
                dist.recv(ones, 0)
            dist.all_gather_object([None, None], "text")
            dist.reduce_scatter(torch.empty(2), [ones[:2], ones[2:4]])
            dist.all_to_all([torch.empty(3), torch.empty(3)], [ones[:3], ones[3:6]])
            dist.scatter(torch.empty(5), [ones[:5], ones[:5]] if rank == 0 else None)
            dist.reduce(ones[:6], 0)
            dist.all_reduce(torch.ones(7, dtype=torch.float64), dist.ReduceOp.SUM, alone)
        dist.all_reduce(half)
    assert dist.all_reduce is original
    dist.all_reduce(ones)  # no longer counted
    return {
        name: [tuple(row.values()) for row in traffic.rows()] for name, traffic in (("outer", outer), ("inner", inner))
    }


def test_every_collective_is_counted_where_it_is_called():
    first, second = run_ranks(_exchange, 2)
    inner = {row[:2]: row[2:] for row in first["inner"]}
    assert inner["reduce_scatter_tensor", "float32"] == (1, 32, 16)
    assert inner["all_gather_into_tensor", "bfloat16"] == (1, 16, 16)
    assert inner["all_gather", "float32"] == (1, 32, 32)
    assert inner["all_to_all_single", "float32"] == (1, 32, 16)
    assert inner["broadcast", "float32"] == (1, 32, 16)
    assert inner["isend", "bfloat16"] == (1, 16, 16)
    assert inner["send", "float32"] == (1, 32, 32)  # and not again as the isend it is made of
    assert ("send", "float32") not in {row[:2] for row in second["inner"]}
    # the pickled object, as PyTorch gathers it before 2.15 and since
    assert inner.get(("all_gather", "uint8"), inner.get(("all_gather_single", "uint8")))[1] > 0
    assert inner["reduce_scatter", "float32"] == (1, 16, 8)
    assert inner["all_to_all", "float32"] == (1, 24, 12)
    assert inner["scatter", "float32"] == (1, 40, 20)
    assert inner["reduce", "float32"] == (1, 24, 12)
    assert inner["all_reduce", "float64"] == (1, 56, 0)  # a group of one rank sends nothing
    outer = {row[:2]: row[2:] for row in first["outer"]}
    assert outer["all_reduce", "float32"] == (1, 32, 32)
    assert outer["all_reduce", "bfloat16"] == (1, 16, 16)
    assert outer.items() >= inner.items()

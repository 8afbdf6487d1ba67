"""Gathers and broadcasts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import Encoding
from tests.comm import harness
from tests.comm.bounds import assert_within
from tests.comm.harness import assert_same_on_all_ranks, cases, finish, of_all_ranks, rank_test, sent_bound, spread


@rank_test
def test_all_gather_into_tensor_is_within_one_rounding() -> None:
    ranks = dist.get_world_size()
    for size, dtype, encoding, asynchronous in cases():
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        before = values.clone()
        output = torch.empty(ranks, size, dtype=dtype, device=harness.DEVICE)
        finish(comm.all_gather_into_tensor(output, values, async_op=asynchronous, encoding=encoding, min_bytes=0))
        for got, exact in zip(output, everyone, strict=True):
            assert_within(got, exact, sent_bound(exact, encoding))
        assert_same_on_all_ranks(output)
        assert torch.equal(values, before)


@rank_test
def test_all_gather_into_tensor_works_in_place() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = spread(ranks * 700)
    own = output.view(ranks, 700)[rank]
    everyone = of_all_ranks(own)
    comm.all_gather_into_tensor(output, own, min_bytes=0)
    for got, exact in zip(output.view(ranks, 700), everyone, strict=True):
        assert_within(got, exact, sent_bound(exact, Encoding()))


@rank_test
def test_all_gather_is_within_one_rounding() -> None:
    for size, dtype, encoding, asynchronous in cases():
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        outputs = [torch.empty_like(values) for _ in everyone]
        finish(comm.all_gather(outputs, values, async_op=asynchronous, encoding=encoding, min_bytes=0))
        for got, exact in zip(outputs, everyone, strict=True):
            assert_within(got, exact, sent_bound(exact, encoding))
            assert_same_on_all_ranks(got)


@rank_test
def test_broadcast_gives_all_ranks_the_same_bits() -> None:
    ranks = dist.get_world_size()
    for index, (size, dtype, encoding, asynchronous) in enumerate(cases()):
        values = spread(size, dtype)
        source = index % ranks
        exact = of_all_ranks(values)[source]
        where = {"src": source} if index % 2 else {"group_src": source}
        finish(comm.broadcast(values, async_op=asynchronous, encoding=encoding, min_bytes=0, **where))
        assert_within(values, exact, sent_bound(exact, encoding))
        assert_same_on_all_ranks(values)


@rank_test
def test_broadcast_in_a_sub_group_takes_the_sources_global_rank() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if len(members) > 1 and rank in members:
        for source, where in ((members[-1], {"src": members[-1]}), (members[0], {"group_src": 0})):
            for min_bytes in (0, 2**30):
                values = torch.full((640,), float(rank), device=harness.DEVICE)
                comm.broadcast(values, group=group, min_bytes=min_bytes, **where)
                assert values.tolist() == [float(source)] * 640
    dist.destroy_process_group(group)

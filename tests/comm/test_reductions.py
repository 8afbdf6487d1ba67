"""Sums and means over ranks."""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist

from fp8booster import comm, formats
from fp8booster.comm import Encoding
from tests.comm import harness
from tests.comm.bounds import assert_within
from tests.comm.harness import (
    ENCODINGS,
    assert_reduced,
    assert_same_on_all_ranks,
    cases,
    finish,
    of_all_ranks,
    rank_test,
    sent_bound,
    spread,
)


@rank_test
def test_all_reduce_is_within_two_roundings() -> None:
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        finish(comm.all_reduce(values, op, async_op=asynchronous, encoding=encoding, min_bytes=0))
        assert_reduced(values, everyone, encoding, op)
        assert_same_on_all_ranks(values)


@rank_test
def test_all_reduce_of_many_dimensions_and_of_a_parameter() -> None:
    parameter = torch.nn.Parameter(spread(6 * 35).view(6, 5, 7))
    everyone = of_all_ranks(parameter.detach().view(-1))
    comm.all_reduce(parameter, min_bytes=0)
    assert parameter.shape == (6, 5, 7)
    assert_reduced(parameter.detach().view(-1), everyone)


@rank_test
def test_results_repeat_bit_for_bit() -> None:
    values = spread(5003, torch.bfloat16)
    first = values.clone()
    comm.all_reduce(first, min_bytes=0)
    for _ in range(10):
        again = values.clone()
        comm.all_reduce(again, min_bytes=0)
        assert torch.equal(again, first)


@rank_test
def test_reduce_scatter_is_within_one_rounding_of_each_rank() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        values = spread(size * ranks, dtype)
        everyone = of_all_ranks(values)
        factor = 1 / ranks if op == dist.ReduceOp.AVG else 1
        exact = sum(everyone) * factor
        bound = sum(sent_bound(each, encoding, ranks) for each in everyone) * factor
        output = torch.empty(size, dtype=dtype, device=harness.DEVICE)
        finish(comm.reduce_scatter_tensor(output, values, op, async_op=asynchronous, encoding=encoding, min_bytes=0))
        mine = slice(rank * size, (rank + 1) * size)
        assert_within(output, exact[mine], bound[mine])


@rank_test
def test_reduce_scatter_of_many_is_that_of_each_into_fp32_too() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = (256, 1024, 7, 300)
    for dtype, encoding, op in product(formats.HIGH_PRECISION, ENCODINGS, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        tensors = [spread(size * ranks, dtype).view(ranks, size) for size in sizes]
        side_by_side = torch.cat(tensors, dim=1)
        exact = torch.empty(sum(sizes), device=harness.DEVICE)
        comm.reduce_scatter_tensor(
            exact, side_by_side.float().view(-1), op, encoding=encoding, min_bytes=0
        )  # 16 bits in FP32: the same values
        for output_dtype in (torch.float32, dtype):
            output = torch.empty(sum(sizes), dtype=output_dtype, device=harness.DEVICE)
            comm.reduce_scatter_coalesced(output, tensors, op, encoding=encoding, min_bytes=0)
            assert torch.equal(output, exact.to(output_dtype))
        plain = torch.empty(sum(sizes), device=harness.DEVICE)
        comm.reduce_scatter_coalesced(plain, tensors, op, min_bytes=2**30)
        factor = 1 / ranks if op == dist.ReduceOp.AVG else 1
        mine = sum(each[rank] for each in of_all_ranks(side_by_side)) * factor
        torch.testing.assert_close(plain.double(), mine, rtol=ranks * torch.finfo(dtype).eps, atol=0.1)
    row = comm.statistics()["reduce_scatter_tensor"]
    assert row.uncompressed == {"small": row.calls // 4}


@rank_test
def test_the_second_cast_of_all_reduce_has_the_encodings_scales() -> None:
    for power_of_two in (True, False):
        values = spread(3000)
        comm.all_reduce(values, encoding=Encoding(power_of_two=power_of_two), min_bytes=0)
        # what FP8 gives times a power of two has no more bits than E4M3
        mantissas, _ = values.double().frexp()
        assert bool((mantissas * 16 == (mantissas * 16).round()).all()) == power_of_two


@rank_test
def test_reduce_scatter_takes_a_list() -> None:
    ranks = dist.get_world_size()
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        parts = [spread(size, dtype).view(1, size) for _ in range(ranks)]
        if size % 2 == 0:  # lists may hold what does not lie in one piece
            parts = [part.view(2, -1).t().contiguous().t() for part in parts]
        ours, whole = torch.empty_like(parts[0].contiguous()), torch.empty(size, dtype=dtype, device=harness.DEVICE)
        options = {"encoding": encoding, "min_bytes": 0}
        finish(comm.reduce_scatter(ours, parts, op, async_op=asynchronous, **options))
        comm.reduce_scatter_tensor(whole, torch.cat([part.reshape(-1) for part in parts]), op, **options)
        assert torch.equal(ours.view(-1), whole)


@rank_test
def test_means_of_the_largest_values_are_finite() -> None:
    ranks = dist.get_world_size()
    for value, dtype in ((3.2e38, torch.float32), (3.2e38, torch.bfloat16), (6e4, torch.float16)):
        for min_bytes, encoding in ((0, Encoding()), (0, Encoding(power_of_two=True)), (2**30, Encoding())):
            options = {"encoding": encoding, "min_bytes": min_bytes}
            values = torch.full((ranks * 640,), value, dtype=dtype, device=harness.DEVICE)
            part = torch.empty(640, dtype=dtype, device=harness.DEVICE)
            comm.reduce_scatter_tensor(part, values, dist.ReduceOp.AVG, **options)
            coalesced = torch.empty_like(part)
            comm.reduce_scatter_coalesced(coalesced, [values], dist.ReduceOp.AVG, **options)
            comm.all_reduce(values, dist.ReduceOp.AVG, **options)
            for found in (part, coalesced, values):
                torch.testing.assert_close(found, torch.full_like(found, value), rtol=2**-4, atol=0)


@rank_test
def test_sub_groups_reduce_among_themselves() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    values = spread(1000, torch.bfloat16)
    everyone = of_all_ranks(values)
    before = values.clone()
    if rank in members:
        comm.all_reduce(values, group=group, min_bytes=0)
        if len(members) > 1:
            assert_reduced(values, [everyone[member] for member in members])
            source = torch.full((64,), float(rank), device=harness.DEVICE)
            comm.broadcast(source, group_src=1, group=group, min_bytes=0)
            assert source.tolist() == [2.0] * 64
            parts = [torch.empty_like(before) for _ in members]
            comm.all_gather(parts, before, group=group, min_bytes=0)
            for part, member in zip(parts, members, strict=True):
                assert_within(part, everyone[member], sent_bound(everyone[member], comm.Encoding()))
        else:
            assert torch.equal(values, before)
            assert comm.statistics()["all_reduce"].uncompressed == {"one rank": 1}
    dist.destroy_process_group(group)

"""Values that are not numbers, of what goes uncompressed, of bytes on the wire and of mistakes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm.threshold import MINIMUM_BYTES, ON_THE_CPU
from fp8booster.monitor.traffic import count_traffic
from tests.comm import harness
from tests.comm.harness import ENCODINGS, LARGE, finish, rank_test, spread


@rank_test
def test_infinity_and_nan_arrive_as_nan() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for bad, encoding in product((math.inf, -math.inf, math.nan), ENCODINGS):
        values = torch.ones(5000, device=harness.DEVICE)
        if rank == ranks - 1:
            values[4321] = bad
        comm.all_reduce(values, encoding=encoding, min_bytes=0)
        assert values[4321].isnan()
        if encoding.block_size == 32:
            assert values[:4000].isfinite().all()
        output = torch.empty(ranks, 2, device=harness.DEVICE)
        comm.all_gather_into_tensor(
            output, torch.tensor([bad, 1.0], device=harness.DEVICE), encoding=encoding, min_bytes=0
        )
        assert output[:, 0].isnan().all()


@rank_test
def test_zeros_stay_zeros_and_tiny_values_survive() -> None:
    values = torch.zeros(3000, device=harness.DEVICE)
    values[2999] = 1e-30
    comm.all_reduce(values, min_bytes=0)
    assert not values[:2500].any()
    assert abs(values[2999].item() / (dist.get_world_size() * 1e-30) - 1) < 2**-3


@rank_test
def test_a_rank_outside_a_group_keeps_its_values() -> None:
    group = dist.new_group([0])
    values, part = torch.ones(3000, device=harness.DEVICE), torch.ones(3000, device=harness.DEVICE)
    if dist.get_rank() > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that it is not a member
            comm.all_reduce(values, dist.ReduceOp.AVG, group)
            comm.reduce_scatter_tensor(part, values, dist.ReduceOp.AVG, group)
    assert values.tolist() == part.tolist() == [1.0] * 3000


@rank_test
def test_what_is_not_compressed_is_plain_and_counted() -> None:
    ranks = dist.get_world_size()
    integers = torch.full((5000,), 3, device=harness.DEVICE)
    comm.all_reduce(integers)
    assert integers.eq(3 * ranks).all()
    largest = torch.full((5000,), float(dist.get_rank()), device=harness.DEVICE)
    comm.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.eq(ranks - 1).all()
    small = torch.full((4,), 0.1, device=harness.DEVICE)
    for asynchronous in (False, True):
        mean = small.clone()
        finish(comm.all_reduce(mean, dist.ReduceOp.AVG, async_op=asynchronous, min_bytes=1000))
        torch.testing.assert_close(mean, small)
    comm.all_reduce(torch.ones(400, dtype=torch.bfloat16, device=harness.DEVICE), min_bytes=801)
    row = comm.statistics()["all_reduce"]
    assert row.calls == 5
    assert row.uncompressed == {"int64": 1, "reduction MAX": 1, "small": 3}
    assert row.wire_bytes == row.raw_bytes
    for call in (
        lambda: comm.all_gather_into_tensor(
            torch.empty(ranks, device=harness.DEVICE), torch.ones(1, device=harness.DEVICE)
        ),
        lambda: comm.broadcast(torch.ones(3, device=harness.DEVICE), 0),
        lambda: comm.all_gather(
            [torch.empty(1, device=harness.DEVICE) for _ in range(ranks)], torch.ones(1, device=harness.DEVICE)
        ),
        lambda: comm.reduce_scatter_tensor(
            torch.empty(2, device=harness.DEVICE), torch.ones(2 * ranks, device=harness.DEVICE)
        ),
        lambda: comm.all_to_all_single(
            torch.empty(ranks, device=harness.DEVICE), torch.ones(ranks, device=harness.DEVICE)
        ),
    ):
        call()
    counted = comm.statistics()
    names = ("all_gather_into_tensor", "broadcast", "all_gather", "reduce_scatter_tensor", "all_to_all_single")
    for name in names:
        assert counted[name].uncompressed == {"small": 1}
        assert name in str(counted)


def large_calls(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Each collective on large tensors, by the plain one's name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = spread(LARGE * ranks, dtype)
    part = values[:LARGE].clone()
    parts = list(values.clone().chunk(ranks))
    to, source = (rank + 1) % ranks, (rank - 1) % ranks

    def ring(module: object) -> None:
        sent = module.P2POp(module.isend, part, to)
        received = module.P2POp(module.irecv, part.clone(), source)
        for work in module.batch_isend_irecv([sent, received]):
            work.wait()

    return {
        "all_reduce": lambda m: m.all_reduce(values.clone()),
        "reduce_scatter_tensor": lambda m: m.reduce_scatter_tensor(part.clone(), values),
        "all_gather_into_tensor": lambda m: m.all_gather_into_tensor(values.clone(), part),
        "all_gather": lambda m: m.all_gather(parts, part),
        "all_to_all_single": lambda m: m.all_to_all_single(values.clone(), values),
        "all_to_all": lambda m: m.all_to_all([p.clone() for p in parts], parts),
        "broadcast": lambda m: m.broadcast(part.clone(), 0),
        "send": ring,
    }


@rank_test
def test_wire_bytes_are_half_of_bf16_and_a_quarter_of_fp32() -> None:
    with patch.dict(MINIMUM_BYTES, dict.fromkeys(MINIMUM_BYTES, MINIMUM_BYTES[ON_THE_CPU])):
        check_wire_bytes()


def check_wire_bytes() -> None:
    for dtype, largest in ((torch.bfloat16, 0.52), (torch.float32, 0.26)):
        for name, call in large_calls(dtype).items():
            with count_traffic() as plain:
                call(dist)
            comm.reset_statistics()
            with count_traffic() as ours:
                call(comm)
            row = comm.statistics()[name]
            assert row.calls == 1, name
            assert row.wire_bytes <= largest * plain.sent, (name, dtype, row.wire_bytes / plain.sent)
            assert {key[1] for key in ours.counts} == {torch.uint8}, name
            assert abs(row.raw_bytes - plain.sent) < dist.get_world_size(), name  # each tensor's share is rounded
            assert row.wire_bytes == ours.sent, name


@rank_test
def test_mistakes_raise_before_anything_is_sent() -> None:
    ranks = dist.get_world_size()
    values = torch.ones(ranks * 8, device=harness.DEVICE)
    for call in (
        lambda: comm.all_reduce(torch.ones(8, 8, device=harness.DEVICE).t(), min_bytes=0),
        lambda: comm.reduce_scatter_tensor(values.clone(), values, min_bytes=0),
        lambda: comm.reduce_scatter_coalesced(values.clone(), [values], min_bytes=0),
        lambda: comm.all_gather_into_tensor(values.clone(), values, min_bytes=0),
        lambda: comm.all_to_all_single(values.clone(), values, None, [1] * ranks),
        lambda: comm.all_to_all_single(values[:-ranks].clone(), values, min_bytes=0),
        lambda: comm.all_to_all([], []),
        lambda: comm.all_to_all([values], [values]),
        lambda: comm.all_gather([], values),
        lambda: comm.all_gather([values.clone() for _ in range(ranks)], values[1:].clone(), min_bytes=0),
        lambda: comm.reduce_scatter(values.clone(), []),
        lambda: comm.reduce_scatter(values.clone(), [values[1:]] * ranks),
        lambda: comm.reduce_scatter_coalesced(values.clone(), []),
        lambda: comm.batch_isend_irecv([]),
        lambda: comm.all_to_all_single(values.clone(), torch.ones(ranks * 8 + 1, device=harness.DEVICE), min_bytes=0),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no ValueError")

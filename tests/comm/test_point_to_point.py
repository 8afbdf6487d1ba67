"""Sends and receives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8booster import comm
from tests.comm import harness
from tests.comm.bounds import assert_within
from tests.comm.harness import cases, of_all_ranks, rank_test, sent_bound, spread


@rank_test
def test_point_to_point_around_the_ring() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    for size, dtype, encoding, blocking in cases():
        options = {"encoding": encoding, "min_bytes": 0}
        values, output = spread(size, dtype), torch.empty(size, dtype=dtype, device=harness.DEVICE)
        exact = of_all_ranks(values)[source]
        if blocking and rank % 2 == 0:
            comm.send(values, to, **options)
            assert comm.recv(output, source, **options) == source
        elif blocking:
            waiting = comm.irecv(output, source, **options)
            comm.send(values, to, **options)
            waiting.wait()
        else:
            # two ranks that both send first would wait for each other over NCCL
            sending = comm.isend(values, to, **options) if rank % 2 else None
            comm.irecv(output, source, **options).wait()
            (sending or comm.isend(values, to, **options)).wait()
        assert_within(output, exact, sent_bound(exact, encoding))


@rank_test
def test_batched_point_to_point_around_the_ring() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    for size, dtype, encoding, _ in cases():
        options = {"encoding": encoding, "min_bytes": 0}
        values, output = spread(size, dtype), torch.empty(size, dtype=dtype, device=harness.DEVICE)
        number, arrived = torch.tensor([rank], device=harness.DEVICE), torch.tensor([-1], device=harness.DEVICE)
        exact = of_all_ranks(values)[source]
        works = comm.batch_isend_irecv(
            [
                comm.P2POp(comm.isend, values, to, **options),
                comm.P2POp(comm.irecv, output, source, **options),
                comm.P2POp(comm.isend, number, to),
                comm.P2POp(comm.irecv, arrived, source),
            ]
        )
        for work in works:
            work.wait()
        assert_within(output, exact, sent_bound(exact, encoding))
        assert arrived.item() == source

"""The tests of collectives over NCCL, one rank a GPU.

pytest -m gpu tests/comm/test_gpu.py        starts two ranks where there are two GPUs
torchrun --nproc-per-node 8 -m tests.comm.test_gpu
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.comm import (  # noqa: F401
    harness,
    test_exchanges,
    test_gathers,
    test_handles,
    test_point_to_point,
    test_reductions,
    test_sub_groups,
    test_values,
)
from tests.comm.harness import TESTS, spread
from tests.distributed import run_ranks

SECONDS = 60
"""What a test lasts at most."""


def run_on_gpu() -> dict[str, str | None]:
    """Join by NCCL, objects and barriers of the tests included; every test's name, and None or what went wrong."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    harness.DEVICE = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", device_id=harness.DEVICE)
    try:
        return run_tests()
    finally:
        dist.destroy_process_group()


def run_tests() -> dict[str, str | None]:
    """Run the tests up to the first that fails."""
    tests = {**TESTS, "streams_do_not_disturb_each_other": streams_do_not_disturb_each_other}
    outcomes: dict[str, str | None] = dict.fromkeys(tests, "not run: a test before it failed")
    for name, function in tests.items():
        torch.manual_seed(1000 + dist.get_rank())
        comm.reset_statistics()
        # ranks that miss each other hang: say where, and end
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            function()
            dist.barrier()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
            # at once: the other ranks may wait for this one until they are killed
            sys.stderr.write(f"rank {dist.get_rank()}: {name}\n{outcomes[name]}\n")
            break
        finally:
            faulthandler.cancel_dump_traceback_later()
    return outcomes


def streams_do_not_disturb_each_other() -> None:
    """Many asynchronous calls from several streams, whose memory is given back and taken again at once."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    for _ in range(10):
        inputs = [spread(3_000_000, torch.bfloat16) for _ in range(8)]
        expected = [values.clone() for values in inputs]
        for values in expected:
            comm.all_reduce(values, min_bytes=0)
        torch.cuda.synchronize()
        works = []
        for index, values in enumerate(inputs):
            with torch.cuda.stream(streams[index % 4]):
                works.append(comm.all_reduce(values, async_op=True, min_bytes=0))
        for index, work in enumerate(works):
            with torch.cuda.stream(streams[index % 4]):
                work.wait()
                torch.empty(3_000_000, device="cuda").fill_(float("nan"))  # takes what was given back
        torch.cuda.synchronize()
        for values, right in zip(inputs, expected, strict=True):
            assert torch.equal(values, right)


def report(outcome: dict[str, str | None]) -> int:
    """Print what failed on this rank; return how many did."""
    failed = {name: trace for name, trace in outcome.items() if trace is not None}
    for name, trace in failed.items():
        sys.stdout.write(f"rank {os.environ['RANK']}: {name}\n{trace}\n")
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"{len(outcome) - len(failed)} of {len(outcome)} tests passed\n")
    return len(failed)


@pytest.mark.gpu
def test_on_nccl() -> None:
    ranks = min(torch.cuda.device_count(), 4)
    if ranks < 2:
        pytest.skip("needs two GPUs")
    for rank, outcome in enumerate(run_ranks(run_on_gpu, ranks, initialize=False, timeout=400)):
        assert len(outcome) > len(TESTS)
        failed = {name: trace for name, trace in outcome.items() if trace is not None}
        assert not failed, f"rank {rank}: {failed}"


if __name__ == "__main__":
    sys.exit(report(run_on_gpu()))

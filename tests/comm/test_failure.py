"""A rank that is killed, or hangs, or is killed between the two halves of an all-reduce: the others fail in time."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.distributed import rank_context

TIMEOUT = timedelta(seconds=3)
"""Of the group, once all ranks have met."""

LATEST = 120.0
"""Seconds after which a rank hangs; torch would let it wait for 30 minutes."""

RANKS = 3
VICTIM = RANKS - 1


def kill_oneself(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(rank: int, store: str, fate: str, asynchronous: bool, answers: SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=RANKS)
    values = torch.ones(50_000)
    comm.all_reduce(values)  # all is well
    dist.distributed_c10d._set_pg_timeout(TIMEOUT)
    if rank == VICTIM:
        if fate == "killed":
            kill_oneself()
        if fate == "hangs":
            time.sleep(600)
        for name in ("all_gather_single", "all_gather_into_tensor"):
            setattr(dist, name, kill_oneself)
    try:
        work = comm.all_reduce(values, async_op=asynchronous)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        answers.put((rank, type(error).__module__, str(error)))
    else:
        answers.put((rank, "", "no error"))
    # The answer is given, and the group broken: gloo's threads, still in their timeouts, may abort an orderly exit.
    os._exit(0)


@pytest.mark.parametrize(
    ("fate", "asynchronous"), [("killed", False), ("killed half way", True), ("hangs", False), ("hangs", True)]
)
def test_the_others_fail_with_an_error_of_torch(fate: str, asynchronous: bool, tmp_path: Path) -> None:
    context = rank_context()
    answers = context.SimpleQueue()
    processes = [
        context.Process(target=run_rank, args=(rank, str(tmp_path / "store"), fate, asynchronous, answers))
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    survivors = processes[:VICTIM]
    try:
        for process in survivors:
            process.join(timeout=LATEST)
        assert [process.exitcode for process in survivors] == [0] * VICTIM
    finally:
        for process in processes:
            process.kill()
            process.join()
    found = [answers.get() for _ in survivors]
    for rank, module, message in found:
        assert message != "no error", rank
        assert "fp8booster" not in module
    if fate == "hangs":  # the first to time out closes its connections, which the other may see instead
        assert any("Timed out" in message for *_, message in found), found

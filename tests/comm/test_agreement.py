"""Ranks that disagree about a call: each is told, none waits for ever, and what follows runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm, formats
from fp8booster.comm import Encoding, agreement
from fp8booster.comm.observer import observer
from tests.distributed import run_ranks

RANKS = 3


def told(call: Callable[[], object]) -> str:
    """The sentence that a call raises, or what it gives instead."""
    try:
        result = call()
    except ValueError as error:  # which is not the group's timeout
        return str(error)
    return f"no ValueError but {result}"


def of_size(count: int, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], object]]:
    """Each collective with this many values a part."""
    own = torch.ones(count, dtype=dtype)
    whole = torch.ones(RANKS * count, dtype=dtype)
    parts = [own.clone() for _ in range(RANKS)]
    return {
        "all_reduce": lambda: comm.all_reduce(own),
        "reduce_scatter_tensor": lambda: comm.reduce_scatter_tensor(own, whole),
        "reduce_scatter": lambda: comm.reduce_scatter(own, parts),
        "reduce_scatter_coalesced": lambda: comm.reduce_scatter_coalesced(own, [whole]),
        "all_gather_into_tensor": lambda: comm.all_gather_into_tensor(whole, own),
        "all_gather": lambda: comm.all_gather(parts, own),
        "all_to_all_single": lambda: comm.all_to_all_single(whole.clone(), whole),
        "broadcast": lambda: comm.broadcast(own, 0),
        "AutomaticScaling": lambda: comm.AutomaticScaling(RANKS, own.device).reduce_scatter_tensor(own, whole),
    }


def sizes_and_dtypes() -> list[str]:
    """What was not told as it should."""
    rank, wrong = dist.get_rank(), []
    # as many bytes in FP8: of 4999, 5000 or 5001 values a third is padded to 1680
    for name, call in of_size(4999 + rank).items():
        sentence = told(call)
        if "disagree" not in sentence or f"rank {rank} calls" not in sentence:
            wrong.append(f"{name}: {sentence}")
    for name, call in of_size(2000, torch.bfloat16 if rank == 1 else torch.float32).items():
        sentence = told(call)
        if "bfloat16" not in sentence or "float32" not in sentence:
            wrong.append(f"{name}: {sentence}")
    values = torch.ones(3000)
    for name, call in {
        "op": lambda: comm.all_reduce(values, dist.ReduceOp.AVG if rank else dist.ReduceOp.SUM),
        "format": lambda: comm.all_reduce(values, encoding=Encoding(format=formats.FORMATS[rank % 2])),
        "threshold": lambda: comm.all_reduce(values, min_bytes=2**30 if rank else 0),
        "source": lambda: comm.broadcast(values, rank % 2),
        "plain": lambda: comm.all_reduce(torch.ones(5 + rank, dtype=torch.int64)),
    }.items():
        sentence = told(call)
        if "disagree" not in sentence:
            wrong.append(f"{name}: {sentence}")
    for call in of_size(2500).values():  # all is well again
        call()
    return wrong


def test_sizes_dtypes_and_settings_that_differ_are_told_to_every_rank_before_anything_is_sent() -> None:
    for wrong in run_ranks(sizes_and_dtypes, RANKS):
        assert wrong == []


def new_to_one(asynchronous: bool) -> str:
    """Rank 0 makes a call that it never made, the others one that they know; as many bytes are sent."""
    agreement.PATIENCE = timedelta(seconds=1)
    comm.all_reduce(torch.ones(5000))
    values = torch.ones(4999 if dist.get_rank() == 0 else 5000)

    def call() -> None:
        work = comm.all_reduce(values, async_op=asynchronous)
        if asynchronous:
            work.wait()

    sentence = told(call)
    dist.barrier()  # all of them are there
    comm.all_reduce(torch.ones(6000))
    return sentence


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_whose_call_is_new_while_others_make_one_that_they_know_is_told(asynchronous: bool) -> None:
    first, *others = run_ranks(new_to_one, RANKS, asynchronous)
    assert "values=4999" in first
    assert "2 of the 3 ranks make a call that is not new to them" in first
    assert others == ["no ValueError but None"] * 2


def late() -> list[float]:
    """A rank that comes later than others wait for it is no disagreement."""
    agreement.PATIENCE = timedelta(seconds=0.2)
    if dist.get_rank() == 1:
        time.sleep(1)
    values = torch.ones(5000)
    comm.all_reduce(values)
    work = comm.all_reduce(values, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    return values.unique().tolist()


def test_a_late_rank_agrees() -> None:
    assert run_ranks(late, 2) == [[2.0], [2.0]]


def asynchronous_and_new() -> str:
    agreement.PATIENCE = timedelta(seconds=30)
    values = torch.ones(5000 + dist.get_rank())
    out = torch.ones(2 * len(values))
    return told(lambda: comm.all_gather_into_tensor(out, values, async_op=True).wait())


def test_asynchronous_calls_that_are_new_to_all_are_told_to_all() -> None:
    for sentence in run_ranks(asynchronous_and_new, 2):
        assert "values=5000" in sentence
        assert "values=5001" in sentence


def known_to_all() -> str:
    dist.set_debug_level(dist.DebugLevel.INFO)
    for count in (5000, 5001):
        comm.all_reduce(torch.ones(count))
    return told(lambda: comm.all_reduce(torch.ones(5000 + dist.get_rank())))


def test_at_a_debug_level_every_call_is_compared() -> None:
    for sentence in run_ranks(known_to_all, 2):
        assert "values=5000" in sentence
        assert "values=5001" in sentence


def left_in_the_store() -> list[bool]:
    """Whether the keys of a call stay, once all have read them."""
    values = torch.ones(5000)
    comm.all_reduce(values)
    dist.barrier()
    calls = observer._groups[dist.group.WORLD]
    store, calls.store = calls.store, Mock(spec=[])
    comm.all_reduce(values, dist.ReduceOp.SUM)  # known: a question would raise
    return [store.check([f"0/{name}"]) for name in ("first", "came", "verdict", "read")]


def test_a_known_call_asks_nothing_and_leaves_nothing_in_the_store() -> None:
    assert run_ranks(left_in_the_store, 2) == [[False] * 4] * 2

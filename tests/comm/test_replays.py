"""Calls that a CUDA graph holds are counted when it is replayed, on the CPU in the place of one."""

from __future__ import annotations

from unittest.mock import Mock

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm.observer import observer
from tests.distributed import run_ranks


def calls() -> int:
    return comm.statistics()["all_reduce"].calls


def one_rank_replays() -> list[int]:
    """How often the rank has counted its calls; then all ranks make one that is new to them."""
    comm.reset_statistics()
    values = torch.ones(3000)
    comm.all_reduce(values)
    counted = [calls()]
    if dist.get_rank():
        for _ in range(2):
            comm.all_reduce(values)
        counted += [1, calls()]
    else:
        with observer.noted_at_replays() as note_calls:
            comm.all_reduce(values)
        counted.append(calls())
        with observer.noted_at_replays():  # what a replay does, without its Python
            comm.all_reduce(values)
        note_calls()
        note_calls()
        counted.append(calls())
    comm.all_reduce(torch.ones(5000))  # compared under its number among the calls
    return counted


def test_a_rank_that_replays_counts_as_one_that_does_not() -> None:
    assert run_ranks(one_rank_replays, 2) == [[1, 1, 3]] * 2


def numbers_of_a_capture() -> list[int]:
    """How many calls of the group are counted: before a capture, after it, and after each replay."""
    dist.set_debug_level(dist.DebugLevel.INFO)  # every call is compared, but those that a graph holds
    values = torch.ones(3000)
    comm.all_reduce(values)
    of_group = observer._groups[dist.group.WORLD]
    numbers = [of_group.count]
    of_group.store = Mock(spec=[])  # a comparison would raise
    with observer.noted_at_replays() as note_calls:
        comm.all_reduce(values)
    for _ in range(3):
        numbers.append(of_group.count)
        note_calls()
    return numbers


def test_a_call_that_a_graph_holds_has_a_number_at_each_replay_and_is_not_compared() -> None:
    assert run_ranks(numbers_of_a_capture, 2) == [[1, 1, 2, 3]] * 2

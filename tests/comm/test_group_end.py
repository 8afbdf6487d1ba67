"""What a group leaves does not reach one that comes after it, with its name and on its store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.colossal.zero import lone_save
from fp8booster.comm import agreement, threshold
from tests.distributed import run_ranks


def groups() -> Iterator[dist.ProcessGroup]:
    """Groups of all ranks, one after the other, whose ranks leave what they do in one store.

    Torch's own keys are apart: a rank may take an address for one of now that another left before.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    agreement._get_process_group_store = lambda group: dist.PrefixStore(group.group_name, store)
    dist.distributed_c10d._get_default_store = lambda: store
    for number in range(2):
        dist.init_process_group("gloo", store=dist.PrefixStore(f"torch {number}", store), rank=rank, world_size=size)
        yield dist.group.WORLD
        dist.barrier()
        dist.destroy_process_group()


def refused() -> None:
    with pytest.raises(ValueError, match="disagree"):
        comm.all_reduce(torch.ones(5000 + dist.get_rank()))


def new_to_rank_0() -> None:
    comm.all_reduce(torch.ones(5000))
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="not new to them"):
            comm.all_reduce(torch.ones(4999))
    else:
        comm.all_reduce(torch.ones(5000))


def late_broadcast() -> None:
    """Its source does not learn whether the others came."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
    comm.broadcast(torch.ones(5000), 0)


def never_waited_for() -> None:
    if dist.get_rank() == 1:
        time.sleep(0.5)
    values = torch.ones(5000)
    work = comm.all_reduce(values, async_op=True)
    dist.barrier()
    if dist.get_rank() == 1:
        work.wait()


BEFORE = {each.__name__: each for each in (refused, new_to_rank_0, late_broadcast, never_waited_for)}


def two_groups(before: str) -> list[float]:
    """The sums that the second group makes of other values."""
    agreement.PATIENCE = timedelta(seconds=0.2)
    made = []
    for number, _ in enumerate(groups()):
        if number == 0:
            BEFORE[before]()
        else:
            for count in (6000, 7000):
                values = torch.ones(count)
                comm.all_reduce(values)
                made += values.unique().tolist()
    return made


@pytest.mark.parametrize("before", BEFORE)
def test_a_second_group_of_the_same_ranks_agrees(before: str) -> None:
    assert run_ranks(two_groups, 2, before, initialize=False) == [[2.0, 2.0]] * 2


def two_that_save() -> list[str]:
    """What rank 0 is told: in the first group rank 1 comes late, in the second it does not come."""
    lone_save.PATIENCE = 0.2
    told = []
    for number, group in enumerate(groups()):
        try:
            if dist.get_rank() == 0:
                lone_save.require_all_ranks(group)
        except RuntimeError as error:
            told.append(str(error))
        dist.barrier()
        if dist.get_rank() == 1 and number == 0:
            lone_save.require_all_ranks(group)
        dist.barrier()
    return told


def test_a_save_of_an_earlier_group_is_none_of_a_later_one() -> None:
    told, _ = run_ranks(two_that_save, 2, initialize=False)
    assert len(told) == 2
    assert all("rank 1 did not join it" in each for each in told)


def two_with_pairs() -> list[str]:
    """In the first group ranks 0 and 1 save twice in a pair whose name is that of ranks 0 and 2 in the second."""
    lone_save.PATIENCE = 2.0
    names = []
    for _, members in zip(groups(), ([0, 1], [0, 2]), strict=True):
        pair = dist.new_group(members)
        if dist.get_rank() in members:
            names.append(pair.group_name)
            for _ in range(2):
                lone_save.require_all_ranks(pair)
    return names


def test_saves_are_counted_for_a_group_and_not_for_its_name() -> None:
    (first, second), *_ = run_ranks(two_with_pairs, 3, initialize=False)
    assert first == second


def topologies() -> list[str]:
    found = []
    for number, group in enumerate(groups()):
        if number:
            os.environ.update(LOCAL_WORLD_SIZE="1", LOCAL_RANK="0")
        found.append(threshold.topology(group))
    return found


def test_a_topology_is_that_of_the_ranks_of_now() -> None:
    right = [threshold.INSIDE_A_NODE, threshold.BETWEEN_NODES]
    assert run_ranks(topologies, 2, initialize=False) == [right] * 2

"""What ranks leave for the first one in a store, and what it answers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from fp8booster import mailbox
from fp8booster.mailbox import Mailbox
from tests.distributed import run_ranks

RANKS = 3


@dataclass(frozen=True)
class Group:
    own: int

    def rank(self) -> int:
        return self.own

    def size(self) -> int:
        return RANKS


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(mailbox, "_get_process_group_store", lambda group: store)
    return store


def boxes(name: str = "box") -> list[Mailbox]:
    return [Mailbox(Group(rank), name) for rank in range(RANKS)]


def test_what_all_have_left_is_read_and_deleted(store: dist.Store) -> None:
    first, second, third = boxes()
    second.leave(1, {"scale": 0.5})
    third.leave(1)
    third.leave(2, "the next")
    assert first.collect(1, 0.0) == ({1: {"scale": 0.5}, 2: None}, [])
    assert store.num_keys() == 1
    assert first.collect(2, 0.0) == ({2: "the next"}, [1])


def test_who_comes_late_is_found_with_those_that_came_before(store: dist.Store) -> None:
    first, second, third = boxes()
    second.leave("save")
    assert first.collect("save", 0.01) == ({1: None}, [2])
    with ThreadPoolExecutor() as threads:
        found = threads.submit(first.collect, "save", 10.0)
        third.leave("save", 3)
    assert found.result() == ({1: None, 2: 3}, [])
    assert store.num_keys() == 0


def test_an_answer_is_read_by_all_and_deleted_by_the_last(store: dist.Store) -> None:
    first, *others = boxes()
    with ThreadPoolExecutor() as threads:
        found = [threads.submit(each.read_answer, "links", 10.0) for each in others]
        first.answer("links", [1, 2])
    assert [each.result() for each in found] == [[1, 2]] * 2
    assert store.num_keys() == 0
    with pytest.raises(RuntimeError, match=r"the first rank did not answer within 0.01 s"):
        others[0].read_answer("links", 0.01)


def test_boxes_of_one_store_are_apart(store: dist.Store) -> None:
    _, second, third = boxes("one")
    second.leave(0)
    third.leave(0)
    assert boxes("other")[0].collect(0, 0.0) == ({}, [1, 2])


def left_behind(deletes: bool) -> int:
    """Keys that rank 1 leaves in the store when it ends the group."""
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=size)
    before = store.num_keys()
    dist.barrier()
    if rank:
        mailbox._get_process_group_store = lambda group: store
        Mailbox(dist.group.WORLD, "box", deletes).leave(0)
        dist.destroy_process_group()
        store.set("ended", "")
        return 0
    store.wait(["ended"])
    found = store.check(["fp8booster box/0/1"])
    dist.destroy_process_group()
    assert before
    return found


@pytest.mark.parametrize("deletes", [True, False])
def test_a_group_that_ends_deletes_what_is_not_to_be_read_later(deletes: bool) -> None:
    assert run_ranks(left_behind, 2, deletes, initialize=False)[0] is not deletes

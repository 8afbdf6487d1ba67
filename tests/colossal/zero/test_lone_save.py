"""Who waits for whom before a model is saved, by a store of this process."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from fp8booster import mailbox
from fp8booster.colossal.zero import lone_save
from fp8booster.colossal.zero.lone_save import require_all_ranks, saved_by_every_rank

RANKS = {"data": [2, 5, 7], "other": [2, 5]}


@dataclass(frozen=True)
class Group:
    """A process group, as one of its ranks has it."""

    name: str
    own: int

    def rank(self) -> int:
        return RANKS[self.name].index(self.own)

    def size(self) -> int:
        return len(RANKS[self.name])


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What makes this process one rank or another, each with counts of its own, and tells how many keys there are."""
    stores = {name: dist.HashStore() for name in RANKS}
    groups = {(name, rank): Group(name, rank) for name, own in RANKS.items() for rank in own}
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: RANKS[group.name])
    monkeypatch.setattr(mailbox, "_get_process_group_store", lambda group: stores[group.name])
    monkeypatch.setattr(lone_save, "PATIENCE", 0.05)
    return SimpleNamespace(
        call=lambda rank, group="data": require_all_ranks(groups[group, rank]),
        keys=lambda: sum(store.num_keys() for store in stores.values()),
    )


def test_the_first_rank_goes_on_when_all_have_come_and_leaves_nothing(ranks: Any) -> None:
    for _ in range(3):
        for rank in (7, 5):
            ranks.call(rank)
        assert ranks.keys() == 2
        ranks.call(2)
        assert ranks.keys() == 0


def test_ranks_may_be_saves_ahead_and_in_several_groups(ranks: Any) -> None:
    for _ in range(2):
        for rank in (5, 7):
            ranks.call(rank)
        ranks.call(5, "other")
    assert ranks.keys() == 6
    for _ in range(2):
        ranks.call(2)
        ranks.call(2, "other")
    assert ranks.keys() == 0


@pytest.mark.parametrize(
    ("came", "told"), [((), r"ranks 5(,| and) 7 did"), ((5,), "rank 7 did"), ((7,), "rank 5 did")], ids=str
)
def test_who_did_not_come_is_named(ranks: Any, came: tuple[int, ...], told: str) -> None:
    for rank in came:
        ranks.call(rank)
    ranks.call(5, "other")  # another group's
    with pytest.raises(RuntimeError, match=f"rank 2 saves a model and {told} not join it within 0.05 s"):
        ranks.call(2)


def test_what_came_to_an_earlier_save_does_not_count(ranks: Any) -> None:
    for rank in (5, 7, 2):
        ranks.call(rank)
    ranks.call(7)
    with pytest.raises(RuntimeError, match="rank 5 did not join"):
        ranks.call(2)


def test_models_and_adapters_are_saved_so_and_loads_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(lone_save, "require_all_ranks", done.append)

    class IO:
        def save_model(self, model: Any, *args: Any, **kwargs: Any) -> str:
            done.append(("save", args, kwargs))
            return "saved"

        save_lora_as_pretrained = load_model = save_optimizer = save_model

    io = IO()
    assert saved_by_every_rank(io) is io
    gathers = SimpleNamespace(zero_optimizer=SimpleNamespace(groups_that_gather=lambda: ["one", "other"]))
    call = ("save", ("path",), {"shard": True})
    for name, waits in (
        ("save_model", True),
        ("save_lora_as_pretrained", True),
        ("load_model", False),
        ("save_optimizer", False),
    ):
        for model in (gathers, SimpleNamespace(zero_optimizer=None), SimpleNamespace()):
            done.clear()
            assert getattr(io, name)(model, "path", shard=True) == "saved"
            assert done == [*(["one", "other"] if waits and model is gathers else []), call]

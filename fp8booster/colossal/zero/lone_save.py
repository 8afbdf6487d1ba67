"""A check that every rank of a group takes part in a save, before the one that writes waits for it in vain."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from colossalai.checkpoint_io import CheckpointIO
from torch import nn

from fp8booster.comm.agreement import LeftKeys
from fp8booster.reading import first_of

PATIENCE = 30.0
"""Seconds that the first rank of a group waits for the others."""

# short beside a save, and long enough that the store is not flooded
_LOOK = 0.02  # seconds between looks


class _Saves:
    """Counts the saves of a group that this rank took part in, and keeps what it left in the store of all."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.count = 0
        self.store = dist.distributed_c10d._get_default_store()
        self.left = LeftKeys(group, self.store)


_saves: weakref.WeakKeyDictionary[dist.ProcessGroup, _Saves] = weakref.WeakKeyDictionary()


def saved_by_every_rank(io: CheckpointIO) -> CheckpointIO:
    """Make a plugin's checkpoint IO see, before it saves a model, that every rank does; returns it.

    Loading is left alone: ranks may begin it at very different times, and no program loads on one alone.
    """
    for name in ("save_model", "save_lora_as_pretrained"):
        setattr(io, name, _together(getattr(io, name)))
    return io


def _together(upstream: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(upstream)
    def save(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        optimizer = getattr(model, "zero_optimizer", None)
        # without weights in FP8 nothing is gathered here, and rank 0 may save alone as far as ZeRO goes
        for group in () if optimizer is None else optimizer.groups_that_gather():
            require_all_ranks(group)
        return upstream(model, *args, **kwargs)

    return save


def require_all_ranks(group: dist.ProcessGroup) -> None:
    """Return when every rank of a group has called this; on ranks but the first of it, return at once.

    Only the first rank of a data parallel group writes a model, so it is the one that programs let save alone. The
    others may wait long for it, while it writes what it was given before.

    Raises:
        RuntimeError: on the first rank, where another has not called it within `PATIENCE` seconds.
    """
    ranks = dist.get_process_group_ranks(group)
    own = dist.get_rank()
    saves = _saves.get(group)
    if saves is None:
        saves = _saves[group] = _Saves(group)
    store = saves.store
    keys = {rank: f"fp8booster/{group.group_name}/{saves.count}/{rank}" for rank in ranks[1:]}
    # a key in the store and no collective: that would make the others wait until the first rank comes
    if own in keys:
        saves.left.keys.add(keys[own])
        store.set(keys[own], "")
    elif absent := _absent(store, keys):
        raise RuntimeError(
            f"rank {own} saves a model and rank{'s' * (len(absent) > 1)} {first_of(absent)} did not join it within "
            f"{PATIENCE:g} s; with FP8 communication each rank holds a part of the weights, so call "
            "booster.save_model on every rank"
        )
    else:
        # the store lives as long as the job, and each save would leave keys in it
        for key in keys.values():
            store.delete_key(key)
    saves.count += 1


def _absent(store: dist.Store, keys: dict[int, str]) -> list[str]:
    """The ranks whose keys are not set when patience is over."""
    deadline = time.monotonic() + PATIENCE
    # not store.wait, which would hold the connection that other threads of this process use
    while not store.check(list(keys.values())):
        if time.monotonic() > deadline:
            return [str(rank) for rank, key in keys.items() if not store.check([key])]
        time.sleep(_LOOK)
    return []

"""A check that every rank of a group takes part in a save, before the one that writes waits for it in vain."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from colossalai.checkpoint_io import CheckpointIO
from torch import nn

from fp8booster.mailbox import Mailbox
from fp8booster.reading import first_of

PATIENCE = 30.0
"""Seconds that the first rank of a group waits for the others."""


class _Saves:
    """The saves of a group that this rank took part in."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.box, self.count = Mailbox(group, "saves"), 0


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
    saves = _saves.get(group)
    if saves is None:
        saves = _saves[group] = _Saves(group)
    # no collective: that would make the others wait until the first rank comes
    if saves.box.rank:
        saves.box.leave(saves.count)
    elif absent := saves.box.collect(saves.count, PATIENCE)[1]:
        first, *others = dist.get_process_group_ranks(group)
        late = [str(others[rank - 1]) for rank in absent]
        raise RuntimeError(
            f"rank {first} saves a model and rank{'s' * (len(late) > 1)} {first_of(late)} did not join it within "
            f"{PATIENCE:g} s; with FP8 communication each rank holds a part of the weights, so call "
            "booster.save_model on every rank"
        )
    saves.count += 1

"""Passes values of a group's ranks to the first of them, and its answers back, through the group's store.

Not by a collective: that would make ranks wait for each other, and on GPUs none for objects leaves the device alone.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

_LOOK = 0.02
"""Seconds between looks: so few that nobody notices, and so many that the store is not flooded."""


class LeftKeys:
    """The keys of a store that are to be deleted when a group ends, unless that was done before."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        self.keys: set[str] = set()
        self._store = store
        _left.setdefault(group, []).append(self)

    def delete(self) -> None:
        """Delete them; the store's host may have gone."""
        with contextlib.suppress(RuntimeError):  # another rank, which had the store, ended before
            for key in self.keys:
                self._store.delete_key(key)


_left: weakref.WeakKeyDictionary[dist.ProcessGroup, list[LeftKeys]] = weakref.WeakKeyDictionary()


def _deleting_keys(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def end(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for left in _left.pop(group, ()):
            left.delete()
        return method(group, *args, **kwargs)

    return end


# `destroy_process_group` goes through these for each group, by whatever name a program imported it
for _name in ("shutdown", "abort"):
    setattr(dist.ProcessGroup, _name, _deleting_keys(getattr(dist.ProcessGroup, _name)))


class Mailbox:
    """Values by a key, each of which is used once. Once all have read them, or all were read, they are deleted.

    Args:
        group: its ranks.
        name: of the box, by which another one of the group is told from it.
        deletes: a rank that ends the group deletes what it left, for a later group may have the same store. False: the
            first rank may read it later than that, and no later box has this name.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, deletes: bool = True) -> None:
        self.rank, self.ranks = group.rank(), group.size()
        # torch keeps its own keys of the group there
        self._store = dist.PrefixStore(f"fp8booster {name}", _get_process_group_store(group))
        self._left = LeftKeys(group, self._store) if deletes else None

    def leave(self, key: object, value: object = None) -> None:
        """Leave a value for the first rank."""
        self._put(f"{key}/{self.rank}", value)

    def collect(self, key: object, patience: float) -> tuple[dict[int, Any], list[int]]:
        """Return on the first rank what each other one has left, and which have left nothing.

        Where some have not, it can be called again.

        Args:
            key: as they gave it to `leave`.
            patience: seconds that they have.
        """
        keys = {rank: f"{key}/{rank}" for rank in range(1, self.ranks)}
        self._came(list(keys.values()), patience)
        found = {rank: self._read(name) for rank, name in keys.items() if self._store.check([name])}
        absent = [rank for rank in keys if rank not in found]
        if not absent:
            self._delete(*keys.values())
        return found, absent

    def answer(self, key: object, value: object) -> None:
        """Let all other ranks read a value of the first one."""
        self._put(f"{key}/answer", value)

    def read_answer(self, key: object, patience: float) -> Any:
        """Return on another rank what the first one answers; the last to read it deletes it.

        Raises:
            RuntimeError: it has not within `patience` seconds.
        """
        name, count = f"{key}/answer", f"{key}/read"
        if not self._came([name], patience):
            raise RuntimeError(f"the first rank did not answer within {patience:g} s; look into its log")
        value = self._read(name)
        if self._store.add(count, 1) == self.ranks - 1:
            self._delete(name, count)
        return value

    def _put(self, name: str, value: object) -> None:
        if self._left is not None:
            self._left.keys.add(name)
        self._store.set(name, pickle.dumps(value))  # type: ignore[arg-type] # the annotation knows text alone

    def _read(self, name: str) -> Any:
        return pickle.loads(self._store.get(name))

    def _delete(self, *names: str) -> None:
        for name in names:
            self._store.delete_key(name)

    def _came(self, names: list[str], patience: float) -> bool:
        """Tell whether values are there, at the latest when patience is over."""
        deadline = time.monotonic() + patience
        # not store.wait, which would hold the connection that other threads of this process use
        while not self._store.check(names):
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK)
        return True

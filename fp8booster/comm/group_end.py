"""What this process keeps for a process group, and leaves in a store for its ranks, goes when the group ends.

A program may destroy its groups and make others: with the same names, on the same store.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_ends: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Callable[[], object]]] = weakref.WeakKeyDictionary()


def before_end(group: dist.ProcessGroup, clean: Callable[[], object]) -> None:
    """Call `clean()` once, before a group is destroyed or aborted; it may find the store's host gone."""
    _ends.setdefault(group, []).append(clean)


class LeftKeys:
    """The keys of a store that are to be deleted when a group ends, unless that was done before."""

    def __init__(self, group: dist.ProcessGroup, store: dist.Store) -> None:
        self.keys: set[str] = set()
        self._store = store
        before_end(group, self._delete)

    def _delete(self) -> None:
        for key in self.keys:
            self._store.delete_key(key)


def _ending(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def end(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        for clean in _ends.pop(group, ()):
            with contextlib.suppress(RuntimeError):  # another rank, which had the store, ended before
                clean()
        return method(group, *args, **kwargs)

    return end


# through which `destroy_process_group` goes, by whatever name a program imported it, for each of the groups
for _name in ("shutdown", "abort"):
    setattr(dist.ProcessGroup, _name, _ending(getattr(dist.ProcessGroup, _name)))

"""What the host counts of calls that a CUDA graph captures: nothing then, and once at each replay.

A capture sends nothing, and a replay runs no Python: what a call notes on the host is kept, and noted when the graph is
replayed. So ranks that replay and ranks that do not have counted the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Note = Callable[[], None]


class _Now:
    """What this process captures at the moment; the backward of a capture runs on another thread."""

    kept: list[Note] | None = None


def note(what: Note) -> bool:
    """Note something of a call; returns False where it is kept for replays."""
    if _Now.kept is None:
        what()
        return True
    _Now.kept.append(what)
    return False


@contextmanager
def noted_at_replays() -> Iterator[Note]:
    """Inside, notes are kept; what is given makes them, once each time that it is called."""
    kept: list[Note] = []
    before, _Now.kept = _Now.kept, kept

    def make() -> None:
        for what in kept:
            what()

    try:
        yield make
    finally:
        _Now.kept = before

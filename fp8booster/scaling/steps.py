"""Count the steps of the optimizers of this process, as `freshness` sees them."""

from __future__ import annotations

from typing import ClassVar


class Steps:
    """One count for the process: hooks of torch see that an optimizer steps, and not whose weights it has."""

    count: ClassVar[int] = 0

    backwards: ClassVar[int] = 0
    """Those of layers since whose making `count` has not grown, so that others may write their weights."""


def note_step() -> None:
    """An optimizer has stepped."""
    Steps.count += 1


def optimizer_steps() -> int:
    """Changes when one does."""
    return Steps.count

"""Count the steps of the optimizers of this process, as `freshness` sees them."""

from __future__ import annotations


# one count for the process: hooks of torch see that an optimizer steps, and not whose weights it has
class _Steps:
    count = 0


def note_step() -> None:
    """An optimizer has stepped."""
    _Steps.count += 1


def optimizer_steps() -> int:
    """Changes when one does."""
    return _Steps.count

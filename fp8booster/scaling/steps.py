"""Count the steps of the optimizers of this process, as `freshness` sees them."""

from __future__ import annotations


class _Steps:
    count = 0


def note_step() -> None:
    """An optimizer has stepped."""
    _Steps.count += 1


def optimizer_steps() -> int:
    """Changes when one does."""
    return _Steps.count

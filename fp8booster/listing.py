"""Lists in a sentence, which name the first and count the others."""

from __future__ import annotations

from collections.abc import Sequence


def first_of(items: Sequence[str], shown: int = 8) -> str:
    """The items, joined by commas; of more than `shown` these alone and how many there are beside them."""
    more = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {more} more" if more > 0 else "")

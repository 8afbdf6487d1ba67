"""Checks of the fields of configurations and strategies: each error names the field and what it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def require_one_of(owner: object, name: str, allowed: Iterable[Any]) -> None:
    """Raise ValueError for a field whose value is none of these, of the same type."""
    value, allowed = getattr(owner, name), tuple(allowed)
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        choices = " or ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; use {choices}")


def require_switch(owner: object, *names: str) -> None:
    """Raise ValueError for fields that are neither True nor False."""
    for name in names:
        require_one_of(owner, name, (True, False))


def require_whole(owner: object, name: str, least: int, most: int) -> None:
    """Raise ValueError for a field that is no whole number in a range."""
    value = getattr(owner, name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{type(owner).__name__}.{name} is {value!r}; use a whole number from {least} to {most}")

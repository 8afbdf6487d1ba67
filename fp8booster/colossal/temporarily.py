"""Attributes of Colossal-AI's objects, set for the length of a call into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def temporarily(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of `owner` for the length of a `with` block; they must be there, and come back as they were."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)

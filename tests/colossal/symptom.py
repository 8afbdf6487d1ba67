"""What a defect of colossalai shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Symptom(NamedTuple):
    """What happens when a patch is taken out."""

    show: Callable[[], None]
    """Raises, on every rank alike, when the patch is taken out."""

    error: str
    """What it then raises: part of `repr(error)`."""

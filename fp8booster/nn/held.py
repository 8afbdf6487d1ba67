"""What modules hold beside parameters and modules."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Held = TypeVar("Held")


def held_by_modules(model: nn.Module, kind: type[Held]) -> list[Held]:
    """The objects of a class that the modules of a model hold as attributes."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, kind)]

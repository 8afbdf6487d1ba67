"""How backward makes a tensor again from what another saves anyway, so that its reader need not save it.

As a delivered amax, it comes as an attribute of the tensor object, together with the tensor's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

_ATTRIBUTE = "_fp8booster_recipe"


Make = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
"""Takes what was saved and gives a tensor as a matrix, [M, K], and its amax: float32, whose largest entry counts; None
where its cast must find it."""


class Recipe(NamedTuple):
    """What makes a tensor again, or one within rounding of it."""

    make: Make
    """It holds no tensor itself, so that what is saved passes through autograd's hooks, as those of checkpointing."""

    of: tuple[torch.Tensor, ...]
    """What another node of the graph saves."""


def deliver_recipe(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Attach a recipe to a tensor just made, which one product will read."""
    if not torch.compiler.is_compiling():
        setattr(tensor, _ATTRIBUTE, (tensor._version, recipe))
    return tensor


def delivered_recipe(tensor: torch.Tensor) -> Recipe | None:
    """The recipe that came with a tensor, if one did and the tensor has not changed since."""
    if torch.compiler.is_compiling():
        return None
    found = getattr(tensor, _ATTRIBUTE, None)
    return found[1] if found is not None and found[0] == tensor._version else None


def as_saved(tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
    """The recipe of a tensor, [..., K], that another node of the graph saves itself."""
    return tensor.reshape(-1, tensor.shape[-1]), None

"""How backward makes a tensor again from what another saves anyway, so that its reader need not save it.

As a delivered amax, it comes as an attribute of the tensor object, together with the tensor's version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8booster.kernels.cast import partial_amaxes
from fp8booster.nn.linear.delivered_amax import deliver_amax

_ATTRIBUTE = "_fp8booster_recipe"


class Make(NamedTuple):
    """How a tensor is made again, or one within rounding of it, from tensors that were saved.

    It holds no tensor itself, so that what is saved passes through autograd's hooks, as those of checkpointing.
    """

    matrix: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    """Takes what was saved and gives the tensor as a matrix, [M, K], and its amax: float32, whose largest entry counts;
    None where its cast must find it."""

    transpose: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
    """Takes what was saved, and `dtype` and `power_of_two` as `kernels.cast.cast` does, and gives the transpose that
    this would make of the matrix by the amax of forward, and its inverse scale, in one pass. None: two are needed."""


class Recipe(NamedTuple):
    """What makes a tensor again."""

    make: Make

    of: tuple[torch.Tensor, ...]
    """What another node of the graph saves, and what is small."""


def deliver_recipe(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Attach a recipe to a tensor just made, which one product will read."""
    if not torch.compiler.is_compiling():
        setattr(tensor, _ATTRIBUTE, (tensor._version, tensor.data_ptr(), recipe))
    return tensor


def delivered_recipe(tensor: torch.Tensor) -> Recipe | None:
    """The recipe that came with a tensor, if one did and the tensor has not changed since."""
    if torch.compiler.is_compiling():
        return None
    found = getattr(tensor, _ATTRIBUTE, None)
    if found is None or found[0] != tensor._version or found[1] != tensor.data_ptr():
        return None
    return found[2]


def deliver_as_saved(tensor: torch.Tensor, *, one_scale: bool) -> None:
    """Attach the recipe of a tensor, [..., K], that another node of the graph saves itself.

    Args:
        tensor: just made; one product will read it.
        one_scale: its casts have one scale: the amax comes with it, found once for that of forward and of backward.
    """
    if torch.compiler.is_compiling():
        return
    saved = tensor.detach()
    of = [saved]
    if one_scale:
        of.append(partial_amaxes(saved.flatten(0, -2)))
        deliver_amax(tensor, of[1])
    deliver_recipe(tensor, Recipe(Make(_as_matrix), tuple(of)))


def _as_matrix(tensor: torch.Tensor, amax: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    return tensor.flatten(0, -2), amax

"""Attach to a tensor the amax that its cast needs, and a recipe by which backward computes it again.

Both are attributes of the tensor object, together with the tensor's version and place. A tensor that was computed from
it has none. One that was given other data lies elsewhere, and one that was changed in place has another version:
torch's operations raise it, our kernels and collectives do, and `freshness` does so for those of torch.distributed. A
change in place through `.data`, as a tensor hook may make it, is not seen. autograd hands the very object that one
backward returned to the next, unless it had to add a second gradient to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.cast import partial_amaxes

AMAX, RECIPE = "_fp8booster_amax", "_fp8booster_recipe"
"""Attributes; who finds none need not ask `delivered_amax` or `delivered_recipe`."""


def deliver_amax(tensor: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """Attach its amax, float32, whose largest entry counts, to a tensor just made; None: it is not known."""
    if amax is not None and not (torch.compiler.is_compiling() or tensor.is_inference()):
        setattr(tensor, AMAX, (tensor._version, tensor.data_ptr(), amax))
    return tensor


def delivered_amax(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the amax that came with a tensor, if it did and the tensor has not changed since."""
    return _delivered(tensor, AMAX)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, [..., K], as a matrix of K columns, with the amax that came with it."""
    return deliver_amax(tensor.reshape(-1, tensor.shape[-1]), delivered_amax(tensor))


class Recipe(NamedTuple):
    """Computes a tensor again, or one within rounding of it."""

    matrix: Callable[..., tuple[Tensor, Tensor | None]]
    """Takes `saved` and returns the tensor as a matrix, [M, K], and its amax: float32, whose largest entry counts; None
    where its cast must find it."""

    saved: tuple[Tensor, ...] = ()  # tensors that another node of the graph saves, and small ones
    transpose: Callable[..., tuple[Tensor, Tensor]] | None = None
    """Takes `saved`, and `dtype` and `power_of_two` as `kernels.cast.cast` does, and returns in one pass the FP8
    transpose under the amax of forward, and its inverse scale. None: that takes two passes."""

    def without_saved(self) -> Recipe:
        """Return what a node keeps beside the tensors that it saves through autograd, whose hooks see these alone."""
        return self._replace(saved=())


def deliver_recipe(tensor: Tensor, recipe: Recipe) -> Tensor:
    """Attach a recipe to a tensor just made, which one product will read."""
    if not torch.compiler.is_compiling():
        setattr(tensor, RECIPE, (tensor._version, tensor.data_ptr(), recipe))
    return tensor


def delivered_recipe(tensor: Tensor) -> Recipe | None:
    """Return the recipe that came with a tensor, if one did and the tensor has not changed since."""
    return _delivered(tensor, RECIPE)


def deliver_as_saved(tensor: Tensor, *, one_scale: bool) -> None:
    """Attach the recipe of a tensor, [..., K], that another node of the graph saves itself.

    Args:
        tensor: just made; one product will read it.
        one_scale: its casts have one scale: the amax comes with it, found once for forward and backward.
    """
    if torch.compiler.is_compiling():
        return
    saved = [tensor.detach()]
    if one_scale:
        saved.append(partial_amaxes(saved[0].flatten(0, -2)))
        deliver_amax(tensor, saved[1])
    deliver_recipe(tensor, Recipe(_as_matrix, tuple(saved)))


def _as_matrix(tensor: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return tensor.flatten(0, -2), amax


def _delivered(tensor: torch.Tensor, attribute: str) -> Any:
    if torch.compiler.is_compiling():
        return None
    found = getattr(tensor, attribute, None)
    # changed in place since, or given other memory
    if found is None or found[0] != tensor._version or found[1] != tensor.data_ptr():
        return None
    return found[2]

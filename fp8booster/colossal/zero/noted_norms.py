"""Norms of gradients, found when these are reduced and remembered while they do not change.

A norm is an attribute of the gradient's tensor object, together with the tensor's count of changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.kernels.norms import norms_of
from fp8booster.optim.gradient_sums import GradientSum

NORM_BYTES = 2**29
"""Gradients whose norms are found at once, beside backward."""

_ATTRIBUTE = "_fp8booster_norm"


def note_norms(gradients: Sequence[torch.Tensor]) -> None:
    """Remember the norms of gradients, one or more, as they are now."""
    for gradient, norm in zip(gradients, norms_of(gradients), strict=True):
        setattr(gradient, _ATTRIBUTE, (gradient._version, norm))


def forget_norm(gradient: torch.Tensor) -> None:
    """Forget the norm of a gradient that was changed past torch's count."""
    gradient.__dict__.pop(_ATTRIBUTE, None)


def noted_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the norm of each gradient, float32 [], found now where none is remembered."""
    # a hook or the user may have changed a gradient between backward and step
    changed = [each for each in gradients if getattr(each, _ATTRIBUTE, (None,))[0] != each._version]
    if changed:
        note_norms(changed)
    return [getattr(each, _ATTRIBUTE)[1] for each in gradients]


class NormQueue:
    """Gradients that were reduced and whose norms are yet to be found, many at once: a launch takes the host time."""

    def __init__(self) -> None:
        self.waiting: list[GradientSum] = []

    def add(self, gradients: Sequence[GradientSum]) -> None:
        """Append gradients, and find the norms of all when they are many."""
        self.waiting += gradients
        if sum(each.nbytes for each in self.waiting) >= NORM_BYTES:
            note_norms(self.waiting)
            self.waiting.clear()

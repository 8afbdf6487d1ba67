"""Norms of gradients, found when these are reduced and remembered while they do not change.

A norm is an attribute of the gradient's tensor object, together with the tensor's count of changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.kernels.norms import norms_of

_ATTRIBUTE, _NEVER = "_fp8booster_norm", (None,)


def note_norms(gradients: Sequence[torch.Tensor]) -> None:
    """Remember the norms of gradients, one or more, as they are now."""
    for gradient, norm in zip(gradients, norms_of(gradients).unbind(), strict=True):
        setattr(gradient, _ATTRIBUTE, (gradient._version, norm))


def forget_norm(gradient: torch.Tensor) -> None:
    """Forget the norm of a gradient that was changed past torch's count."""
    gradient.__dict__.pop(_ATTRIBUTE, None)


def noted_norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each gradient, float32 [gradients], found now where none is remembered."""
    # a hook or the user may have changed a gradient between backward and step
    changed = [each for each in gradients if getattr(each, _ATTRIBUTE, _NEVER)[0] != each._version]
    if len(changed) == len(gradients):  # as of a small model, in whose backward none were found
        return norms_of(gradients)
    if changed:
        note_norms(changed)
    return torch.stack([getattr(each, _ATTRIBUTE)[1] for each in gradients])

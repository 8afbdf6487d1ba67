"""The amax that came with a tensor, from the kernel that made it, so that a cast need not read the tensor for it.

It is an attribute of the tensor object. A tensor that was computed from it has none, and an in-place change is seen by
torch's version counter, so a stale amax is never used: who finds none computes it. autograd hands the very object that
one backward returned to the next, unless it had to add a second gradient to it.
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "_fp8booster_amax"


def deliver_amax(tensor: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Attach its amax, float32, whose largest entry counts, to a tensor just made."""
    if not (torch.compiler.is_compiling() or tensor.is_inference()):
        setattr(tensor, _ATTRIBUTE, (tensor._version, amax))
    return tensor


def delivered_amax(tensor: torch.Tensor) -> torch.Tensor | None:
    """The amax that came with a tensor, if it did and the tensor has not changed since."""
    if torch.compiler.is_compiling():
        return None
    found = getattr(tensor, _ATTRIBUTE, None)
    return found[1] if found is not None and found[0] == tensor._version else None

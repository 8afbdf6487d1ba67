"""The amax that came with a tensor, from the kernel that made it, so that a cast need not read the tensor for it.

It is an attribute of the tensor object, together with the tensor's version and place. A tensor that was computed from
it has none. One that was given other data lies elsewhere, and one that was changed in place has another version:
torch's operations raise it, our kernels and collectives do, and `weights.freshness` does so for those of
torch.distributed. Who finds no amax that fits computes it. A change in place through `.data`, as a tensor hook may make
it, is not seen. autograd hands the very object that one backward returned to the next, unless it had to add a second
gradient to it.
"""

from __future__ import annotations

import torch

_ATTRIBUTE = "_fp8booster_amax"


def deliver_amax(tensor: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
    """Attach its amax, float32, whose largest entry counts, to a tensor just made; None: it is not known."""
    if amax is not None and not (torch.compiler.is_compiling() or tensor.is_inference()):
        setattr(tensor, _ATTRIBUTE, (tensor._version, tensor.data_ptr(), amax))
    return tensor


def delivered_amax(tensor: torch.Tensor) -> torch.Tensor | None:
    """The amax that came with a tensor, if it did and the tensor has not changed since."""
    if torch.compiler.is_compiling():
        return None
    found = getattr(tensor, _ATTRIBUTE, None)
    if found is None or found[0] != tensor._version or found[1] != tensor.data_ptr():
        return None
    return found[2]

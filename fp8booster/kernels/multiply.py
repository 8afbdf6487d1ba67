"""A tensor times one number that lies on its device, in place, and at no cost where the number is 1.

Asking whether it is 1 would make the host wait for the device; the kernel looks for itself.
"""

from __future__ import annotations

from torch import Tensor

from fp8booster.kernels.operators import operator


@operator(writes=("tensor",))
def multiply_(tensor: Tensor, factor: Tensor) -> Tensor:
    """Multiply a tensor in place, in FP32, rounded once.

    Args:
        tensor: any shape, contiguous, BF16, FP16 or FP32.
        factor: float32, one value.

    Returns:
        The tensor.
    """
    return tensor.copy_(tensor.float() * factor)

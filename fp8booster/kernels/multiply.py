"""A tensor times one number that lies on its device, in place, and at no cost where the number is 1.

Asking whether it is 1 would make the host wait for the device; the kernel looks for itself.
"""

from __future__ import annotations

import torch

from fp8booster.kernels.device import runs_triton


def multiply_(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply a tensor in place, in FP32, rounded once.

    Args:
        tensor: any shape, contiguous, BF16, FP16 or FP32.
        factor: float32, one value.

    Returns:
        The tensor.
    """
    if runs_triton(tensor):
        from fp8booster.kernels.multiply_triton import multiply_triton_  # Triton is needed only here

        multiply_triton_(tensor, factor)
        torch.autograd.graph.increment_version(tensor)
        return tensor
    return multiply_reference_(tensor, factor)


def multiply_reference_(tensor: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """What `multiply_` computes, in torch."""
    return tensor.copy_(tensor.float() * factor)

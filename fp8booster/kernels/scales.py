"""Real-time scaling: from the largest magnitude of a tensor, as it is now, to the scale of its cast.

    scale = max(format) / amax        multiplies before the cast
    inverse scale = 1 / scale         multiplies the product after it

Eager code, compiled code and Triton kernels agree on both bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fp8booster import formats

# cap of every scale: its inverse, 2**-126, is the smallest normal float32, so neither is flushed to zero or infinite. A
# tensor whose amax lies under 448 / 2**126 (5.3e-36) keeps fewer bits; BF16 and FP16 gradients end far above.
MAX_SCALE = 2.0**126

SCALE_STRIDE = 4
"""Values of float32 from one scale of a product to the next: 16 bytes."""

_EXPONENT_BITS = 0x7F800000  # of a float32: without its mantissa a positive number is the power of two below it


def amax_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of a tensor, NaN where it holds a NaN.

    Args:
        tensor: any shape, floating point; no elements give 0.

    Returns:
        float32, shape [].
    """
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=tensor.device)
    low, high = tensor.detach().aminmax()  # abs() would write all magnitudes to memory first
    return torch.maximum(-low, high).float()


def amaxes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `amax_of` each of some tensors of one device, by a few launches for all."""
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return [norm.float() for norm in torch._foreach_norm(filled, math.inf)] if filled else []


def new_inverse_scales(count: int, device: torch.device) -> torch.Tensor:
    """Return memory for scales of products: float32 [count], each at a multiple of 16 bytes."""
    # cuBLAS refuses a product whose scale lies elsewhere (CUBLAS_STATUS_NOT_SUPPORTED, seen with CUDA 13.0 on an H200)
    return torch.empty(count, SCALE_STRIDE, dtype=torch.float32, device=device)[:, 0]


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and inverse scale that bring `amax` to the largest finite value of `dtype`.

    Args:
        amax: float32, any shape, each entry the amax of one group of values.
        dtype: the FP8 format of the cast.
        power_of_two: round the scale down to a power of two. Such a scale is exact to apply and to undo, and costs
            up to one bit of range (the bias of FP8-AMAX, Perez et al., arXiv 2309.17224, section 3).

    Returns:
        (scale, inverse scale), float32, of amax's shape. An amax of zero gives 1. An amax of infinity or NaN gives NaN,
        so that all that is computed from the tensor is NaN and the bad step is seen.
    """
    # one double-precision division each, rounded once: a float32 division is approximate in some compilers' fast paths
    scale = (formats.MAX[dtype] / amax.double()).clamp(max=MAX_SCALE).float()
    if power_of_two:
        scale = (scale.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    return scale, (1.0 / scale.double()).float()

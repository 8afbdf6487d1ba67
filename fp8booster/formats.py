"""The two 8-bit floating point formats of Hopper-class GPUs (Micikevicius et al., arXiv 2209.05433).

Names follow torch: `float8_e4m3fn` has four exponent and three mantissa bits and no infinity; `float8_e5m2` has five
and two, infinity and a wider range.
"""

from __future__ import annotations

import torch

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
FORMATS = (E4M3, E5M2)

MAX = {E4M3: torch.finfo(E4M3).max, E5M2: torch.finfo(E5M2).max}
"""Largest finite magnitude of each format: 448 and 57344."""

HIGH_PRECISION = (torch.bfloat16, torch.float16, torch.float32)
"""What may be cast to FP8."""


def require_format(dtype: torch.dtype) -> torch.dtype:
    """Return `dtype` if it is one of the two FP8 formats.

    Raises:
        ValueError: it is another dtype.
    """
    if dtype not in FORMATS:
        raise ValueError(f"{dtype} is not an FP8 format; use torch.float8_e4m3fn or torch.float8_e5m2")
    return dtype


def require_high_precision(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return `tensor` if FP8 can be cast from it.

    Raises:
        TypeError: it is no BF16, FP16 or FP32 tensor.
    """
    if tensor.dtype not in HIGH_PRECISION:
        raise TypeError(f"{what} is {tensor.dtype}; cast it to bfloat16, float16 or float32 first")
    return tensor


def stored_fault(data: torch.Tensor, scale: torch.Tensor) -> str | None:
    """Return why stored FP8 values and their scales are none that a cast gives; None where they may be.

    Args:
        data: FP8 of any shape.
        scale: what the values are multiplied by.
    """
    if not scale.is_floating_point():
        return f"its scales of {scale.dtype} are no floating-point numbers"
    scale = scale.float()  # some types of scales know no comparison
    if not bool((scale.isfinite() & (scale > 0)).all()):
        return "it has scales that are not finite numbers above 0"
    last = torch.tensor(MAX[data.dtype], dtype=data.dtype, device="cpu").view(torch.uint8).item()
    magnitudes = data.view(torch.uint8) & 0x7F
    return "it holds values that are not finite" if magnitudes.numel() and bool(magnitudes.max() > last) else None

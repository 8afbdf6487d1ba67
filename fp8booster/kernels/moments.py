"""Adam's moments in one byte a value: what is stored, and the constants of its codes (`kernels.adamw_8bit`)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.adam_step import require_contiguous

BLOCK = 256
"""Values that share a range."""

MOST_OCTAVES = 32
"""That a block of second moments spans; what is smaller counts as the least of it."""

STEPS = 254
"""Of second moments, from the least to the largest of a block."""

LARGEST = 0x7F7FFFFF
"""Bits of the largest finite float32."""

NAN = 0x7FC00000


class Moments8bit(NamedTuple):
    """Both moments of a tensor of n values, in blocks = ceil(n / 256)."""

    first: torch.Tensor
    """int8 [n]."""

    amaxes: torch.Tensor
    """float32 [blocks]: the largest magnitude of each block of first moments."""

    second: torch.Tensor
    """uint8 [n]."""

    ranges: torch.Tensor
    """int32 [blocks, 2]: of each block of second moments the bits of the least that is not 0, and the step."""

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> Moments8bit:
        """Moments of 0 for so many values."""
        blocks = -(-count // BLOCK)
        return cls(
            torch.zeros(count, dtype=torch.int8, device=device),
            torch.zeros(blocks, dtype=torch.float32, device=device),
            torch.zeros(count, dtype=torch.uint8, device=device),
            torch.zeros(blocks, 2, dtype=torch.int32, device=device),
        )


def require_updatable(value: torch.Tensor, low: torch.Tensor | None, gradient: torch.Tensor) -> None:
    """Raise ValueError where `adamw_8bit.update_8bit` cannot update a weight, in its words."""
    if value.dtype != (torch.float32 if low is None else torch.bfloat16):
        raise ValueError(f"the weight is {value.dtype}; give FP32, or BF16 with the low bits of its master")
    require_contiguous((value, gradient))

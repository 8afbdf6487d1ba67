"""The ways to multiply that are measured, and operands for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8booster import formats
from fp8booster.kernels.product import product
from fp8booster.scaling import INPUT, WEIGHT, RealTime


@dataclass(frozen=True)
class ProductKind:
    """One way to multiply."""

    name: str
    precision: str
    left: torch.dtype = torch.bfloat16
    fast_accumulation: bool = False
    scaling: RealTime = RealTime()  # noqa: RUF009  (frozen)
    by_blocks: bool = False
    """The right operand is a weight, with a scale for each block."""
    by_rows: bool = False
    """The tensor's scale is given once for each row."""


BF16 = ProductKind("BF16", "BF16")
FAST = ProductKind("E4M3 x E4M3 fast", "FP8", formats.E4M3, fast_accumulation=True)
EXACT = ProductKind("E4M3 x E4M3", "FP8", formats.E4M3)
GRADIENT = ProductKind("E5M2 x E4M3", "FP8", formats.E5M2)
ROWWISE = ProductKind(
    "E4M3 rowwise fast", "FP8", formats.E4M3, fast_accumulation=True, scaling=RealTime("rowwise", power_of_two=False)
)
BLOCKWISE = ProductKind(
    "E4M3 blockwise", "FP8", formats.E4M3, scaling=RealTime("blockwise", power_of_two=False), by_blocks=True
)
BLOCKWISE_WGRAD = ProductKind("E4M3 by groups", "FP8", formats.E4M3, scaling=RealTime("blockwise", power_of_two=False))
KINDS = (BF16, FAST, EXACT, GRADIENT, ROWWISE, BLOCKWISE, BLOCKWISE_WGRAD)
"""Without "fast", partial sums are promoted to FP32 on the way."""


@dataclass(frozen=True)
class Operands:
    """One input set: [rows, inner] and [columns, inner]."""

    left: torch.Tensor
    right: torch.Tensor

    @classmethod
    def random(cls, rows: int, inner: int, columns: int, device: torch.device) -> Operands:
        """Normally distributed BF16."""
        return cls(
            torch.randn(rows, inner, device=device, dtype=torch.bfloat16),
            torch.randn(columns, inner, device=device, dtype=torch.bfloat16),
        )

    def multiplication(self, kind: ProductKind) -> Callable[[], torch.Tensor]:
        """A function that multiplies these operands, cast beforehand."""
        if kind is BF16:
            return lambda: self.left @ self.right.t()
        # weights have blocks, where inputs have groups
        left = kind.scaling.cast(INPUT, self.left, kind.left)
        right = kind.scaling.cast(WEIGHT if kind.by_blocks else INPUT, self.right, formats.E4M3)
        scales = [
            one.inverse_scale.repeat(len(one.data)) if kind.by_rows else one.inverse_scale for one in (left, right)
        ]
        return lambda: product(
            left.data, right.data, *scales, out_dtype=torch.bfloat16, fast_accumulation=kind.fast_accumulation
        )

"""Scales written out, as grouped products take them: one for each row of either operand."""

from __future__ import annotations

from torch import Tensor

from fp8booster.kernels.operators import operator


@operator()
def repeat_scales(
    scale_a: Tensor, size_a: int, scale_b: Tensor, size_b: int, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the scales of a product's two operands, each value as many times in a row as fills its size.

    Args:
        scale_a, scale_b: float32, contiguous, of any shape; of n values, where n divides the size.
        size_a, size_b: how many scales are wanted.
        factor: multiplies those of a.

    Returns:
        float32 [size_a] and [size_b], contiguous.
    """
    return _repeated(scale_a * factor, size_a), _repeated(scale_b, size_b)


def _repeated(scale: Tensor, size: int) -> Tensor:
    return scale.reshape(-1, 1).expand(-1, size // scale.numel()).flatten().contiguous()

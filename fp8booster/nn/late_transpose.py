"""The transpose of an FP8 weight, made when backward reads it instead of kept between forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8booster.kernels.transpose import transposed
from fp8booster.tensor import QuantizedMatrix


def transposed_in_backward(quantized: QuantizedMatrix) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A `functional.LateWeight` of a weight that forward multiplies by.

    Args:
        quantized: under one scale, without its transpose; an engine may write later values to the same memory.

    Returns:
        Gives the transpose and its inverse scale.

    Raises:
        RuntimeError, when that is called: the weight has changed since.
    """
    data, version = quantized.data, quantized.data._version

    def late_weight() -> tuple[torch.Tensor, torch.Tensor]:
        if data._version != version:
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: an optimizer "
                "stepped between this forward and its backward; run backward before the step"
            )
        return transposed(data), quantized.inverse_scale

    return late_weight

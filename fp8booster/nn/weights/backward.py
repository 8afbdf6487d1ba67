"""What backward reads of an FP8 weight where autograd keeps nothing of it, and a transpose that is made there."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8booster.kernels.transpose import transposed
from fp8booster.tensor import QuantizedMatrix

BackwardWeight = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives backward the FP8 transpose of the weight, [K16, N16], and its inverse scale."""


def transposed_in_backward(quantized: QuantizedMatrix) -> BackwardWeight:
    """That of a weight that forward multiplies by.

    Args:
        quantized: under one scale, without its transpose; an engine may write later values to the same memory.

    Returns:
        Gives the transpose and its inverse scale.

    Raises:
        RuntimeError, when that is called: the weight has changed since.
    """
    data, version = quantized.data, quantized.data._version

    def backward_weight() -> tuple[torch.Tensor, torch.Tensor]:
        if data._version != version:
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: an optimizer "
                "stepped between this forward and its backward; run backward before the step"
            )
        return transposed(data), quantized.inverse_scale

    return backward_weight

"""FP8 weights that no longer change, of which there is no other copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.source import BackwardWeight, WeightSource, transposed_in_backward
from fp8booster.tensor import QuantizedMatrix


class FrozenWeight(WeightSource):
    """Gives the matrix that a layer holds.

    Args:
        quantized: under any scales, without its transpose.
    """

    lacks_values = True
    refusal = "their weights are kept in FP8 alone"

    def __init__(self, quantized: QuantizedMatrix) -> None:
        super().__init__()
        self._quantized = quantized

    @property
    def held(self) -> QuantizedMatrix:
        """The matrix."""
        return self._quantized

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """As `WeightSource.forward`; the transpose is left to `backward`."""
        return self._quantized

    def backward(self, weights: Sequence[torch.Tensor], casts: Casts) -> BackwardWeight:
        """As `WeightSource.backward`."""
        return transposed_in_backward(self._quantized)

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """As `WeightSource.is_provided`."""
        return True

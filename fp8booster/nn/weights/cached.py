"""FP8 weights that are cast once, and used until the weights change."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.config import FP8Config
from fp8booster.nn.weights.casting import quantize_weight
from fp8booster.nn.weights.freshness import FreshCopy
from fp8booster.nn.weights.source import WeightSource
from fp8booster.nn.weights.stacking import as_matrix
from fp8booster.tensor import QuantizedMatrix


class CachedWeight(WeightSource):
    """Casts the weights when they are first asked for after a change, as `freshness` sees it: once a step."""

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__(is_transposed)
        self._copy: FreshCopy[QuantizedMatrix] = FreshCopy()

    def forward(self, weights: Sequence[torch.Tensor], config: FP8Config, *, transpose: bool) -> QuantizedMatrix:
        """As `WeightSource.forward`; cast now unless a fresh copy with the layouts asked for is there."""
        copy = self._copy.get(weights, config)
        if copy is None or (transpose and not copy.transpose.numel()):
            self.forget()  # first, so that the allocator can give the same memory again
            matrix = as_matrix(weights, self.is_transposed)
            copy = quantize_weight(matrix, config, transposed=transpose)
            self.put(weights, config, copy)
        return copy

    def put(self, weights: Sequence[torch.Tensor], config: FP8Config, quantized: QuantizedMatrix) -> None:
        """Hold a copy that was just made, as fresh as if `forward` had made it.

        Args:
            weights, config: what it was made from and by.
            quantized: their FP8 matrix.
        """
        self.forget()
        self._copy.put(weights, config, quantized)

    @property
    def held(self) -> QuantizedMatrix | None:
        """The copy."""
        return self._copy.made

    def forget(self) -> None:
        """Free the copy."""
        self._copy.forget()

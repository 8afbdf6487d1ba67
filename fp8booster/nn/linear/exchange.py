"""The exchanges of ranks around a layer's three products. The base class exchanges nothing."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix


class Exchange:
    """The points of a linear layer at which ranks may communicate; every method may be overridden.

    fprop reads what `input` gives, and its result passes `output`. In backward dgrad and wgrad read what
    `output_gradient` gives; `input_gradient` begins before wgrad runs, and is waited for after it.
    """

    growth: int = 1
    """How many times more tokens the products have than the layer's input."""

    input_key: Hashable = None
    """What tells the FP8 inputs of two exchanges apart, or None where it is the layer's input as it is."""

    def shape(self, input_shape: torch.Size) -> tuple[int, ...]:
        """Shape of the input as the products read it."""
        return tuple(input_shape)

    def input(self, input: torch.Tensor, casts: Casts, *, transposed: bool) -> QuantizedMatrix:
        """Return the FP8 input that the products read."""
        return casts.quantize(INPUT, input, transposed=transposed)

    def output(self, output: torch.Tensor) -> torch.Tensor:
        """The layer's output, from that of fprop, which nothing else holds."""
        return output

    def output_gradient(
        self, gradient: torch.Tensor, casts: Casts, *, plain: bool, transposed: bool
    ) -> QuantizedMatrix:
        """Return the FP8 gradient of fprop's output, from that of the layer's."""
        return casts.quantize(OUTPUT_GRADIENT, gradient, plain=plain, transposed=transposed)

    def input_gradient(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to make the gradient of the layer's input from that of what fprop read, which nothing else holds.

        Returns:
            What waits for it and gives it.
        """
        return lambda: gradient

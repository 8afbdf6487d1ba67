"""The cast of a layer's weight."""

from __future__ import annotations

import torch

from fp8booster.config import FP8Config
from fp8booster.tensor import QuantizedMatrix, quantize


def quantize_weight(
    weight: torch.Tensor, config: FP8Config, *, transposed: bool, plain: bool = True
) -> QuantizedMatrix:
    """Cast a layer's weight, [N, K]."""
    return quantize(
        weight.detach(),
        config.weight_format,
        plain=plain,
        transposed=transposed,
        rowwise=config.rowwise,
        power_of_two=config.power_of_two,
    )

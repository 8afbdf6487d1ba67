"""The casts of a linear layer's operands, with the scales that `FP8Config` asks for."""

from __future__ import annotations

import torch

from fp8booster.config import FP8Config
from fp8booster.tensor import QuantizedMatrix, quantize


def quantize_by(
    config: FP8Config,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    amax: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Cast a tensor, [..., C], as a matrix of C columns.

    Args:
        config: the scaling.
        tensor, dtype, plain, transposed, amax: as in `tensor.quantize`; no gradient flows to the tensor.
    """
    values = tensor.detach() if tensor.requires_grad else tensor
    return quantize(
        values.reshape(-1, tensor.shape[-1]),
        dtype,
        plain=plain,
        transposed=transposed,
        rowwise=config.rowwise,
        power_of_two=config.power_of_two,
        amax=amax,
    )


def quantize_weight(
    weight: torch.Tensor, config: FP8Config, *, transposed: bool, plain: bool = True
) -> QuantizedMatrix:
    """Cast a layer's weight, [N, K]."""
    return quantize_by(config, weight, config.weight_format, plain=plain, transposed=transposed)


def quantize_input(
    input: torch.Tensor, config: FP8Config, *, transposed: bool, amax: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Cast a layer's input, [..., K], as a matrix of K columns; what made it may know its amax."""
    return quantize_by(config, input, config.input_format, transposed=transposed, amax=amax)

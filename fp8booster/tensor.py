"""A quantized matrix: its FP8 values, in one layout or both, and the scales that undo the cast."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.alignment import BLOCK
from fp8booster.kernels.blockwise_cast import decoded


class QuantizedMatrix(NamedTuple):
    """A matrix of R rows and C columns in FP8.

    R16 and C16 are R and C rounded up to multiples of 16, or of 128 with blockwise scales; what lies beyond R and C is
    zero.
    """

    data: torch.Tensor
    """[R16, C16] FP8, or empty where only the transpose was asked for."""

    transpose: torch.Tensor
    """[C16, R16] FP8, or empty where only the plain layout was asked for."""

    inverse_scale: torch.Tensor
    """Undoes the scale of `data`: float32, shape [] for one scale, [R16] for one a row, of two dimensions for blockwise
    scales, as `kernels.blockwise_cast` has them."""

    transpose_inverse_scale: torch.Tensor | None
    """Undoes the scale of `transpose` where it has its own: float32 [C16], or of two dimensions; None: `inverse_scale`
    does. Where it is [C16] and `inverse_scale` is [], the columns were multiplied by factors before the cast, which
    this undoes and `inverse_scale` does not (`kernels.rowwise_cast`)."""

    def t(self) -> QuantizedMatrix:
        """Return the transpose, in the same memory."""
        if self.transpose_inverse_scale is None:
            return QuantizedMatrix(self.transpose, self.data, self.inverse_scale, None)
        return QuantizedMatrix(self.transpose, self.data, self.transpose_inverse_scale, self.inverse_scale)

    def scale_of_transpose(self) -> torch.Tensor:
        """Return the inverse scale of `transpose`, its own or the one that serves both layouts."""
        return self.inverse_scale if self.transpose_inverse_scale is None else self.transpose_inverse_scale

    @property
    def has_factors(self) -> bool:
        """Tell whether columns were multiplied by factors before the cast."""
        return self.inverse_scale.dim() == 0 and self.transpose_inverse_scale is not None

    @property
    def has_row_scales(self) -> bool:
        """Tell whether each row of `data` has a scale."""
        return self.inverse_scale.dim() == 1

    def dequantize(self, rows: int, columns: int) -> torch.Tensor:
        """Return the values in FP32, [rows, columns], from `data`, or from the transpose where there is no `data`."""
        if self.data.numel() and self.has_factors:
            values = self.data.float() * self.scale_of_transpose()
        elif self.data.numel():
            values = _dequantized(self.data, self.inverse_scale)
        else:
            values = _dequantized(self.transpose, self.scale_of_transpose()).t()
        return values[:rows, :columns]


def stored_scale(inverse_scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the inverse scale of a plain layout, as checkpoints hold that of a weight of [rows, columns].

    Returns:
        float32: [] for one scale, [rows, 1], or [ceil(rows / 128), ceil(columns / 128)]; a copy.
    """
    if inverse_scale.dim() == 1:
        return inverse_scale[:rows, None].clone()
    if inverse_scale.dim() == 2:
        return inverse_scale[: -(-rows // BLOCK), : -(-columns // BLOCK)].clone()
    return inverse_scale.clone()  # one for the memory of several weights


def _dequantized(data: torch.Tensor, inverse_scale: torch.Tensor) -> torch.Tensor:
    return decoded(data, inverse_scale) if inverse_scale.dim() == 2 else data.float() * inverse_scale.view(-1, 1)

"""A quantized matrix: its FP8 values, in one layout or both, and the scales that undo the cast."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.cast import cast
from fp8booster.kernels.rowwise_cast import rowwise_cast


class QuantizedMatrix(NamedTuple):
    """A matrix of R rows and C columns in FP8.

    R16 and C16 are R and C rounded up to multiples of 16; what lies beyond R and C is zero.
    """

    data: torch.Tensor
    """[R16, C16] FP8, or empty where only the transpose was asked for."""

    transpose: torch.Tensor
    """[C16, R16] FP8, or empty where only the plain layout was asked for."""

    inverse_scale: torch.Tensor
    """Undoes the scale of `data`: float32, shape [] for one scale, [R16] for one a row."""

    transpose_inverse_scale: torch.Tensor | None
    """Undoes the scale of `transpose` where it has its own, one a row: float32 [C16]; None: `inverse_scale` does."""

    def scale_of_transpose(self) -> torch.Tensor:
        """The inverse scale of `transpose`, its own or the one that serves both layouts."""
        return self.inverse_scale if self.transpose_inverse_scale is None else self.transpose_inverse_scale

    def dequantize(self, rows: int, columns: int) -> torch.Tensor:
        """The values in FP32, [rows, columns], from `data`, or from the transpose where only that was asked for."""
        if self.data.numel():
            values = self.data.float() * self.inverse_scale.view(-1, 1)
        else:
            values = (self.transpose.float() * self.scale_of_transpose().view(-1, 1)).t()
        return values[:rows, :columns]


def quantize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    rowwise: bool = False,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
) -> QuantizedMatrix:
    """Cast a matrix to FP8 with real-time scales: one, or one for each row of each layout.

    Args:
        matrix: [R, C], BF16, FP16 or FP32.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.
        rowwise: one scale a row instead of one.
        amax: as in `kernels.cast.cast`, for one scale.
    """
    if rowwise:
        return QuantizedMatrix(
            *rowwise_cast(matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two)
        )
    data, transpose, inverse_scale = cast(
        matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two, amax=amax
    )
    return QuantizedMatrix(data, transpose, inverse_scale, None)

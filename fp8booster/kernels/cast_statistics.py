"""Statistics of a cast to FP8: counts, and the power of the values and of their error, in one pass."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import BLOCK
from fp8booster.kernels.operators import operator

FIELDS = ("amax", "nonzero", "flushed", "saturated", "non_finite", "signal", "noise", "fourth")
"""Of each statistic its name; the first is a maximum, the others are sums."""

# a value saturates from so many times the format's maximum on: a scale that is rounded may bring amax a bit above it
BEYOND = 1 + 2.0**-20

_CHUNK = 2**20  # values that the definition has in FP64 at once


@operator()
def cast_statistics(matrix: Tensor, data: Tensor, inverse_scale: Tensor) -> Tensor:
    """Compare a matrix with its cast.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        data: FP8 [R or more, C or more], any strides; what lies beyond R and C is not read.
        inverse_scale: float32: [], of all; [R or more], of each row; or [R or more, C / 128 rounded up], of each 128
            values of a row.

    Returns:
        float64 [parts, len(FIELDS)], of parts of the matrix; the largest and the sums over parts are

            amax        of the finite values
            nonzero     how many finite values are not zero
            flushed     how many of these became zero
            saturated   how many finite values lie beyond the largest value that the format holds at this scale
            non_finite  how many values are NaN or infinite
            signal      sum of squares of the finite values
            noise       sum of squares of what the cast changed them by; NaN where the scale is
            fourth      sum of fourth powers of the finite values, for their kurtosis
    """
    rows, columns = matrix.shape
    step = max(1, _CHUNK // max(1, columns))
    parts = []
    for first in range(0, rows if columns else 0, step):
        last = min(rows, first + step)
        scales = inverse_scale[first:last] if inverse_scale.dim() else inverse_scale
        if scales.dim() == 2:
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
        elif scales.dim():
            scales = scales[:, None]
        rounded, inverse = data[first:last, :columns].double(), scales.double()
        parts.append(statistics(matrix[first:last], rounded * inverse, formats.MAX[data.dtype] * BEYOND * inverse))
    return torch.stack(parts) if parts else torch.zeros(1, len(FIELDS), dtype=torch.float64, device=matrix.device)


def statistics(matrix: Tensor, decoded: Tensor, beyond: Tensor | float = math.inf) -> Tensor:
    """Compare a matrix with its decoded values.

    Args:
        matrix: any shape, floating point.
        decoded: of its shape; zero where a value became zero.
        beyond: magnitudes from which a value saturates, of a shape that broadcasts to the matrix's.

    Returns:
        float64 [len(FIELDS)].
    """
    values = matrix.detach().double()  # an error is far less than its value, and its square in FP32 would be lost
    is_finite = values.isfinite()
    values = torch.where(is_finite, values, 0.0)
    magnitude, is_nonzero, decoded = values.abs(), values != 0, decoded.double()
    error = torch.where(is_finite, values - decoded, 0.0)
    found = (
        magnitude.max(),
        is_nonzero.sum(),
        (is_nonzero & (decoded == 0)).sum(),
        (magnitude > beyond).sum(),
        (~is_finite).sum(),
        values.square().sum(),
        error.square().sum(),
        values.square().square().sum(),
    )
    return torch.stack([each.double() for each in found])

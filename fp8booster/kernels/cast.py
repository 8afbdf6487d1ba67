"""The cast of a matrix to FP8 with a real-time scale, in the layouts that products read.

`cast` is the one entry. `cast_reference` defines what it computes, runs on every device and is what tests compare with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8booster import formats, scaling
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.device import why_no_fp8


def saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round FP32 values to FP8, those beyond the format's range to its largest value; NaN stays NaN.

    The clamp comes first because torch before 2.12 turns what overflows into NaN, and so do some compilers' casts.
    """
    limit = formats.MAX[dtype]
    return values.clamp(-limit, limit).to(dtype)


def padded(matrix: torch.Tensor) -> torch.Tensor:
    """A matrix, [R, C], in FP32 with zeros up to [R16, C16]."""
    rows, columns = matrix.shape
    return F.pad(matrix.float(), (0, aligned(columns) - columns, 0, aligned(rows) - rows))


def cast(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
    amax: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast a matrix to FP8 with one real-time scale.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype: the FP8 format.
        plain: give the matrix as it lies.
        transposed: give its transpose too, or alone.
        power_of_two: see `scaling.scale_of`.
        amax: float32, any shape, whose largest entry is the amax of the matrix; computed here if None.

    Returns:
        ([R16, C16] or empty, [C16, R16] or empty, inverse scale of shape []), where R16 and C16 are R and C rounded up
        to multiples of 16. What lies beyond R and C is a zero times the scale. Both layouts are contiguous.
    """
    if torch.compiler.is_compiling():
        return torch.ops.fp8booster.cast(matrix, dtype, plain, transposed, power_of_two, amax)
    return _cast(matrix, dtype, plain, transposed, power_of_two, amax)


def _cast(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    plain: bool,
    transposed: bool,
    power_of_two: bool,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if matrix.is_cuda and why_no_fp8(matrix.device) is None:
        from fp8booster.kernels.cast_triton import cast_triton as implementation  # Triton is needed only here
    else:
        implementation = cast_reference
    return implementation(matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two, amax=amax)


@torch.library.custom_op("fp8booster::cast", mutates_args=())
def _cast_op(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    plain: bool,
    transposed: bool,
    power_of_two: bool,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`cast` for compiled code, which sees it whole and so computes the same bits as eager code."""
    return _cast(matrix, dtype, plain, transposed, power_of_two, amax)


@_cast_op.register_fake
def _(matrix, dtype, plain, transposed, power_of_two, amax):
    rows, columns = aligned(matrix.shape[0]), aligned(matrix.shape[1])
    return (
        matrix.new_empty((rows, columns) if plain else 0, dtype=dtype),
        matrix.new_empty((columns, rows) if transposed else 0, dtype=dtype),
        matrix.new_empty((), dtype=torch.float32),
    )


def cast_reference(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    plain: bool,
    transposed: bool,
    power_of_two: bool,
    amax: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `cast` computes, in torch."""
    scale, inverse_scale = scaling.scale_of(scaling.amax_of(matrix if amax is None else amax), dtype, power_of_two)
    data = saturate(padded(matrix) * scale, dtype)
    empty = data.new_empty(0)
    # through uint8: torch copies few FP8 tensors on CPU
    transpose = data.view(torch.uint8).t().contiguous().view(dtype) if transposed else empty
    return data if plain else empty, transpose, inverse_scale

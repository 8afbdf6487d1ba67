"""The cast of a matrix to FP8 under one scale, real-time or by earlier amaxes, in the layouts that products read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import ALIGNMENT, aligned
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of, scale_of


def saturate(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round FP32 values to FP8, those beyond the format's range to its largest value; NaN stays NaN."""
    # the clamp comes first: torch before 2.12 turns what overflows into NaN, and so do some compilers' casts
    limit = formats.MAX[dtype]
    return values.clamp(-limit, limit).to(dtype)


def padded(matrix: Tensor, multiple: int = ALIGNMENT) -> Tensor:
    """Return a matrix, [R, C], in FP32 with zeros up to multiples of 16, or of another number."""
    rows, columns = matrix.shape
    return F.pad(matrix.float(), (0, -columns % multiple, 0, -rows % multiple))


def in_layouts(data: Tensor, *, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return an FP8 matrix and its transpose, contiguous, each empty where it is not asked for."""
    empty = data.new_empty(0)
    # through uint8: torch copies few FP8 tensors on CPU
    transpose = data.view(torch.uint8).t().contiguous().view(data.dtype) if transposed else empty
    return data if plain else empty, transpose


def output_shapes(rows: int, columns: int, plain: bool, transposed: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of both layouts of a cast matrix."""
    rows, columns = aligned(rows), aligned(columns)
    return (rows, columns) if plain else (0,), (columns, rows) if transposed else (0,)


def cast_outputs(
    matrix: Tensor, dtype: torch.dtype, *, plain: bool = True, transposed: bool = False, **_: object
) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for the results of `cast`."""
    plain_shape, transposed_shape = output_shapes(*matrix.shape, plain, transposed)
    return (
        matrix.new_empty(plain_shape, dtype=dtype),
        matrix.new_empty(transposed_shape, dtype=dtype),
        matrix.new_empty((), dtype=torch.float32),
    )


@operator()
def partial_amaxes(matrix: Tensor) -> Tensor:
    """Return the amaxes that `cast` finds where it is given none: float32, the largest of which is the matrix's.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
    """
    return amax_of(matrix).view(1)


@operator(rounds_to_fp8=True, fake=cast_outputs)
def cast(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
    amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast a matrix to FP8 with one real-time scale.

    Args:
        matrix: [R, C], BF16, FP16 or FP32, any strides.
        dtype: the FP8 format.
        plain: give the matrix as it lies.
        transposed: give its transpose too, or alone.
        power_of_two: see `scales.scale_of`.
        amax: float32, any shape, whose largest entry is the amax of the matrix; computed here if None.

    Returns:
        ([R16, C16] or empty, [C16, R16] or empty, inverse scale of shape []), where R16 and C16 are R and C rounded up
        to multiples of 16. What lies beyond R and C is a zero times the scale. Both layouts are contiguous.
    """
    scale, inverse_scale = scale_of(amax_of(matrix if amax is None else amax), dtype, power_of_two)
    # Hopper multiplies FP8 only along rows of both operands: what a product sums over must lie along rows, so forward
    # and backward read different layouts. One scale serves both, so the transpose has the same bytes.
    data = saturate((padded(matrix) * scale).contiguous(), dtype)
    return *in_layouts(data, plain=plain, transposed=transposed), inverse_scale


@operator(rounds_to_fp8=True)
def cast_by(
    matrix: Tensor,
    dtype: torch.dtype,
    past: Tensor,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cast by amaxes of earlier steps, in one pass that finds the matrix's own amax too; what lies beyond saturates.

    Args:
        matrix, dtype, plain, transposed, power_of_two: as in `cast`.
        past: its `amax`.

    Returns:
        The results of `cast`, and float32, of any shape, whose largest entry is the matrix's own amax.
    """
    given = cast.reference(matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two, amax=past)
    return *given, amax_of(matrix)


@operator(writes=("history", "inverse_scale"))
def note_amax(history: Tensor, amaxes: Tensor, inverse_scale: Tensor, *, new_step: bool, factor: float = 1.0) -> None:
    """Note the amax of a matrix that was cast, and make its inverse scale NaN if that is not finite.

    Args:
        history: float32 [1 + steps], contiguous: the largest amax of this step so far, then those of steps before.
        amaxes: float32, any shape; the largest entry is the amax.
        inverse_scale: float32 [], of the matrix.
        new_step: the first amax of a step: those noted move on by one, and the oldest goes.
        factor: multiplies the amax that is noted. One that is then zero or not finite is not noted; in a new step that
            of the last step stands for it.
    """
    amax = amaxes.max()
    noted = amax * factor
    newest, past = history[:1], history[:-1] if new_step else history[1:]
    entry = noted.view(1) if new_step else torch.maximum(newest, noted)
    # an amax of 0 or infinity would give the next step a scale that loses all its values
    entry = torch.where((noted > 0) & noted.isfinite(), entry, newest)
    history.copy_(torch.cat([entry, past]))
    # a cast by an earlier amax saturates an infinity; so it reaches all that is computed from the matrix all the same
    inverse_scale.masked_fill_(~amax.isfinite(), torch.nan)

"""The cast of a matrix by amaxes of earlier steps: one pass over memory, which finds the matrix's own amax as well."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.cast import cast
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of


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
    """`kernels.cast.cast` by a given amax; what lies beyond it saturates.

    Args:
        matrix, dtype, plain, transposed, power_of_two: as there.
        past: its `amax`.

    Returns:
        What `cast` gives, and float32, of any shape, whose largest entry is the matrix's own amax.
    """
    given = cast.reference(matrix, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two, amax=past)
    return *given, amax_of(matrix)


@operator(writes=("history", "inverse_scale"))
def note_amax(history: Tensor, amaxes: Tensor, inverse_scale: Tensor, *, new_step: bool, factor: float = 1.0) -> None:
    """Write down the amax of a matrix that was cast, and make its inverse scale NaN if that is not finite.

    So an infinity, which a cast by an earlier amax saturates, reaches all that is computed from the matrix.

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
    entry = torch.where((noted > 0) & noted.isfinite(), entry, newest)
    history.copy_(torch.cat([entry, past]))
    inverse_scale.masked_fill_(~amax.isfinite(), torch.nan)

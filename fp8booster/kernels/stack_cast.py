"""The cast of many matrices as the rows of one, such as the weights of a layer's experts, from where each lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8booster.kernels.cast import cast
from fp8booster.kernels.operators import operator, without_autocast


@operator(rounds_to_fp8=True)
def stack_cast(
    matrices: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast matrices below each other as one, under one scale.

    Args:
        matrices: [R_i, C], of one dtype, BF16, FP16 or FP32; all on one device. Of any number of rows.
        dtype, plain, transposed, power_of_two: as in `kernels.cast.cast`.

    Returns:
        The results of `kernels.cast.cast` of [sum of R_i, C]. On a GPU there is no such matrix in high precision.
    """
    with without_autocast(matrices[0].device.type):
        whole = torch.cat([matrix.detach() for matrix in matrices])
    return cast.reference(whole, dtype, plain=plain, transposed=transposed, power_of_two=power_of_two, amax=None)

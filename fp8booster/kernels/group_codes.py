"""Values in 8 bits, by groups of 128 consecutive values of a row: how activations wait for backward.

    code  = sign(x) * round(127 * sqrt(|x| / amax))        int8, amax of the group
    value = sign(code) * (code / 127)**2 * amax

Near the amax of a group a step is 1.6 % of a value, where E4M3's is 6 to 12 %. The error of normally distributed values
is 0.7 % where E4M3's is 2.7 %; a value at 1/1000 of its group's amax errs by up to 25 %, and one at 1/65000 becomes 0
(benchmarks/results/cpu/saved-activations). An amax is one of the values, so it is exact in their dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
"""Values that share an amax: 2 bytes for each 128 of one byte."""

LEAST_AMAX = 2.0**-100
"""A group whose amax is less is stored as zeros."""

LARGEST_SQUARE = 127.0 * 127.0


class GroupCodes(NamedTuple):
    """A matrix of M rows and K columns in 8 bits."""

    codes: Tensor
    """int8 [M, K]."""

    amaxes: Tensor
    """[M, K / 128, rounded up], of the dtype of the values; NaN where a group holds an infinity or a NaN."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.amaxes.dtype

    @property
    def shape(self) -> torch.Size:
        """[M, K]."""
        return self.codes.shape


def encode_groups(values: Tensor) -> GroupCodes:
    """Encode the rows of a matrix.

    Args:
        values: [M, K], BF16, FP16 or FP32.
    """
    groups = _in_groups(values.float())
    amax = groups.abs().amax(-1)
    is_usable = (amax >= LEAST_AMAX) & amax.isfinite()
    # float64, rounded once: torch divides and takes roots in a faster way on some CPUs
    scale = (LARGEST_SQUARE / torch.where(is_usable, amax, torch.inf).double()).float()
    code = ((groups.abs() * scale[..., None]).double().sqrt().float() + 0.5).floor()
    code = torch.where(is_usable[..., None], torch.where(groups < 0, -code, code), 0).to(torch.int8)
    amax = torch.where(is_usable, amax, torch.where(amax.isfinite(), 0.0, torch.nan))
    return GroupCodes(code.flatten(1)[:, : values.shape[1]].contiguous(), amax.to(values.dtype))


def decode_groups(encoded: GroupCodes) -> Tensor:
    """The values, float32 [M, K]."""
    codes, amaxes = encoded
    groups = _in_groups(codes.float())
    factor = amaxes.float() * torch.tensor(1 / LARGEST_SQUARE, dtype=torch.float32)
    return (groups * groups.abs() * factor[..., None]).flatten(1)[:, : codes.shape[1]]


def values_of(given: Tensor | GroupCodes) -> Tensor:
    """What is given, or was encoded, in FP32."""
    return given.float() if isinstance(given, Tensor) else decode_groups(given)


def new_codes(like: Tensor) -> GroupCodes:
    """Memory for the codes of a matrix, [M, K]."""
    rows, columns = like.shape
    return GroupCodes(like.new_empty((rows, columns), dtype=torch.int8), like.new_empty((rows, -(-columns // GROUP))))


def _in_groups(values: Tensor) -> Tensor:
    """[M, K] as [M, groups, 128], the last filled up with zeros."""
    return F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))

"""Values in 8 bits by the roots of their magnitudes: of groups of values, and of the rows of a matrix by groups of 128.

    code  = round(sign(x) * root(16128 |x| / amax))        int8, -127 to 127, amax of the group; half to even
    value = sign(code) * root^-1(|code|) / 16128 * amax

    bits(root(t)) = bits(t) / 2 + bits(1) / 2              rounded down

`bits` are those of a float32 as an integer. So root is the square root, but for straight lines between powers of 4:
at most 6 % more, and 0.4 dB of signal-to-noise less, for two integer operations.

Activations wait for backward so, and first moments for the next step (`kernels.adamw_8bit`).

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

LARGEST_SQUARE = 16128.0
"""Its root is 127."""

HALF_ONE = 0x3F800000 // 2
"""Half the bits of 1."""


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


def encode_roots(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Encode groups of values.

    Args:
        groups: float32 [..., values of a group].

    Returns:
        int8 codes of this shape; float32 [...]: the amax of each group, 0 where it is less than `LEAST_AMAX`, NaN where
        it is not finite.
    """
    amax = groups.abs().amax(-1)
    is_usable = (amax >= LEAST_AMAX) & amax.isfinite()
    # float64, rounded once: torch divides in a faster way on some CPUs
    scale = (LARGEST_SQUARE / torch.where(is_usable, amax, torch.inf).double()).float()
    root = ((groups.abs() * scale[..., None]).view(torch.int32) // 2 + HALF_ONE).view(torch.float32)
    code = torch.where(is_usable[..., None], root.copysign(groups).round(), 0).to(torch.int8)
    return code, torch.where(amax.isfinite(), torch.where(is_usable, amax, 0.0), torch.nan)


def decode_roots(codes: Tensor, amaxes: Tensor) -> Tensor:
    """The values of `encode_roots`, float32 of the codes' shape."""
    roots = codes.float()
    squares = ((roots.abs().view(torch.int32) - HALF_ONE) * 2).clamp(min=0).view(torch.float32).copysign(roots)
    return squares * (1 / LARGEST_SQUARE) * amaxes.float()[..., None]


def encode_groups(values: Tensor) -> GroupCodes:
    """Encode the rows of a matrix.

    Args:
        values: [M, K], BF16, FP16 or FP32.
    """
    code, amax = encode_roots(_in_groups(values.float()))
    return GroupCodes(code.flatten(1)[:, : values.shape[1]].contiguous(), amax.to(values.dtype))


def decode_groups(encoded: GroupCodes) -> Tensor:
    """Return the values, float32 [M, K], contiguous, as the kernels that read them take them."""
    codes, amaxes = encoded
    return decode_roots(_in_groups(codes), amaxes).flatten(1)[:, : codes.shape[1]].contiguous()


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

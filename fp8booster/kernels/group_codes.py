"""Values in 8 bits by the roots of their magnitudes: of groups of values, and of the rows of a matrix by groups of 128.

    code  = round(sign(x) * root(16128 |x| / amax))        int8, -127 to 127, amax of the group; half to even
    value = sign(code) * root^-1(|code|) / 16128 * amax

    bits(root(t)) = bits(t) / 2 + bits(1) / 2              rounded down

`bits` are those of a float32 as an integer. So root is the square root, but for straight lines between powers of 4:
at most 6 % more, and 0.4 dB of signal-to-noise less, for two integer operations.

Activations wait for backward so, first moments for the next step (`kernels.adamw_8bit`), and sums of gradients for the
next micro-batch. A sum is decoded, added to in FP32 and encoded again, so each micro-batch rounds it once more. Its
amaxes are FP32: they are sums, which no 16 bits hold. What this loses after some micro-batches:
benchmarks/results/cpu/gradient-sums.

Near the amax of a group a step is 1.6 % of a value, where E4M3's is 6 to 12 %. The error of normally distributed values
is 0.7 % where E4M3's is 2.7 %; a value at 1/1000 of its group's amax errs by up to 25 %, and one at 1/65000 becomes 0
(benchmarks/results/cpu/saved-activations). An amax is one of the values, so it is exact in their dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.adamw import require_contiguous
from fp8booster.kernels.operators import operator

GROUP = 128
"""Values that share an amax: 2 bytes for each 128 of one byte."""

LEAST_AMAX = 2.0**-100
"""A group whose amax is less is stored as zeros."""

LARGEST_SQUARE = 16128.0  # its root, as it is defined above, is 127
HALF_ONE = 0x3F800000 // 2  # half the bits of 1

_AT_ONCE = 2**16  # values of a sum that are added to at a time, a multiple of a group's: so many stay in a cache


class GroupCodes(NamedTuple):
    """A matrix of M rows and K columns in 8 bits."""

    codes: Tensor
    """int8 [M, K]."""

    amaxes: Tensor
    """[M, K / 128, rounded up], of the dtype of the values; NaN where a group holds an infinity or a NaN."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
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
    # 16128 over less than 2^-100 would be near the largest float32, and codes of such a group hold nothing of use
    is_usable = (amax >= LEAST_AMAX) & amax.isfinite()
    # float64, rounded once: torch divides in a faster way on some CPUs
    scale = (LARGEST_SQUARE / torch.where(is_usable, amax, torch.inf).double()).float()
    root = ((groups.abs() * scale[..., None]).view(torch.int32) // 2 + HALF_ONE).view(torch.float32)
    code = torch.where(is_usable[..., None], root.copysign(groups).round(), 0).to(torch.int8)
    return code, torch.where(amax.isfinite(), torch.where(is_usable, amax, 0.0), torch.nan)


def decode_roots(codes: Tensor, amaxes: Tensor) -> Tensor:
    """Return the values of `encode_roots`, float32 of the codes' shape."""
    roots = codes.float()
    # a code of 0 would come out of the shifted bits as a tiny number: the clamp makes it 0
    squares = ((roots.abs().view(torch.int32) - HALF_ONE) * 2).clamp(min=0).view(torch.float32).copysign(roots)
    return squares * (1 / LARGEST_SQUARE) * amaxes.float()[..., None]


def encode_groups(values: Tensor) -> GroupCodes:
    """Encode the rows of a matrix.

    Args:
        values: [M, K], BF16, FP16 or FP32.
    """
    code, amax = encode_roots(_in_groups(values.float()))
    # an amax is one of the values, so that it is exact in their dtype
    return GroupCodes(code.flatten(1)[:, : values.shape[1]].contiguous(), amax.to(values.dtype))


def decode_groups(encoded: GroupCodes) -> Tensor:
    """Return the values, float32 [M, K], contiguous, as the kernels that read them take them."""
    codes, amaxes = encoded
    return decode_roots(_in_groups(codes), amaxes).flatten(1)[:, : codes.shape[1]].contiguous()


def values_of(given: Tensor | GroupCodes) -> Tensor:
    """Return values, given as such or encoded, in FP32."""
    return given.float() if isinstance(given, Tensor) else decode_groups(given)


def new_codes(like: Tensor) -> GroupCodes:
    """Return memory for the codes of a matrix, [M, K]."""
    rows, columns = like.shape
    return GroupCodes(like.new_empty((rows, columns), dtype=torch.int8), like.new_empty((rows, -(-columns // GROUP))))


def _in_groups(values: Tensor) -> Tensor:
    """Return [M, K] as [M, groups, 128], the last filled up with zeros."""
    return F.pad(values, (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def zero_sums(like: Tensor) -> GroupCodes:
    """Return the codes of as many zeros, on the tensor's device: int8 [1, n], and FP32 amaxes."""
    count = like.numel()
    return GroupCodes(
        torch.zeros(1, count, dtype=torch.int8, device=like.device),
        torch.zeros(1, -(-count // GROUP), dtype=torch.float32, device=like.device),
    )


@operator()
def add_to_sums(sums: GroupCodes, gradient: Tensor) -> None:
    """Add a gradient to sums in place.

    A group with a value that is not finite, or with a sum that is not, becomes NaN and stays so.

    Args:
        sums: of n values, from `zero_sums`.
        gradient: n values of any shape: BF16, FP16 or FP32.

    Raises:
        ValueError: the gradient's values lie apart, or are not n.
    """
    require_addable(sums, gradient)
    for part, codes, amaxes in _parts(sums, gradient):
        made = encode_groups(decode_groups(GroupCodes(codes, amaxes)) + part)
        codes.copy_(made.codes)
        amaxes.copy_(made.amaxes)


@operator()
def read_sums(sums: GroupCodes, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the sums, and one more gradient, added in FP32 and rounded once to a dtype: [n].

    Args:
        sums: of n values.
        gradient: as in `add_to_sums`, or None.
        dtype: FP32, BF16 or FP16.

    Raises:
        ValueError: as in `add_to_sums`.
    """
    if gradient is None:
        return decode_groups(sums).flatten().to(dtype)
    require_addable(sums, gradient)
    return (decode_groups(sums) + gradient.reshape(1, -1).float()).flatten().to(dtype)


def require_addable(sums: GroupCodes, gradient: Tensor) -> None:
    """Raise ValueError unless a gradient can be added to sums."""
    require_contiguous((gradient,))
    if gradient.numel() != sums.codes.numel():
        raise ValueError(f"a gradient has {gradient.numel()} values and its sum {sums.codes.numel()}; give as many")


def _parts(sums: GroupCodes, gradient: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return whole groups, by `_AT_ONCE` values: of the gradient in FP32, and views of codes and amaxes."""
    flat = gradient.reshape(1, -1)
    return [
        (flat[:, begin:end].float(), sums.codes[:, begin:end], sums.amaxes[:, begin // GROUP : end // GROUP])
        for begin in range(0, flat.shape[1], _AT_ONCE)
        for end in [begin + _AT_ONCE]
    ]

"""Sums of gradients over micro-batches that wait in 8 bits, in the groups of `kernels.group_codes`.

A sum is decoded, added to in FP32 and encoded again, so each micro-batch rounds it once more. Its amaxes are FP32: they
are sums, which no 16 bits hold. What this loses after some micro-batches: benchmarks/results/cpu/gradient-sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.adam_step import require_contiguous
from fp8booster.kernels.group_codes import GROUP, GroupCodes, decode_groups, encode_groups
from fp8booster.kernels.operators import operator

_AT_ONCE = 2**16
"""Values, a multiple of a group's."""


def zero_sums(like: Tensor) -> GroupCodes:
    """The codes of so many zeros, on the tensor's device: int8 [1, n], and FP32 amaxes."""
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
    """The sums, and one more gradient, added in FP32 and rounded once to a dtype: [n].

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
    """Whole groups that stay in a processor's cache: FP32 values of the gradient, and views of codes and amaxes."""
    flat = gradient.reshape(1, -1)
    return [
        (flat[:, begin:end].float(), sums.codes[:, begin:end], sums.amaxes[:, begin // GROUP : end // GROUP])
        for begin in range(0, flat.shape[1], _AT_ONCE)
        for end in [begin + _AT_ONCE]
    ]

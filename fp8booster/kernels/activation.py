"""The activation between a feed-forward block's two products, of one tensor or gated by another.

    y = f(x)             y = f(gate) * up        in FP32, rounded once

    silu       f(x) = x s(x)                                        s(x) = 1 / (1 + exp(-x))
    gelu_tanh  f(x) = x s(2 sqrt(2 / pi) (x + 0.044715 x^3))        as 1 + tanh(z) = 2 s(2 z)
    gelu       f(x) = x / 2 (1 + erf(x / sqrt(2)))

SiLU that gates is SwiGLU (Shazeer, arXiv 2002.05202, equation 6); GELU is that of Hendrycks and Gimpel
(arXiv 1606.08415), exact or by their tanh.

x and up may be halves of one tensor, as one product of both gives them. Those that `activate` was asked to encode are
taken in their place as well, to make y again for a product of backward.

Rows of experts may be multiplied by their routers' weights too. A sum of what experts make of a token is then one of
rows as they are, and the gradient of a weight a sum over the features here, not over those that an expert gives.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.cast import cast
from fp8booster.kernels.group_codes import GroupCodes, encode_groups, values_of
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of

KINDS = ("silu", "gelu_tanh", "gelu")

LINEAR, CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715  # of GELU by tanh


class RowWeights(NamedTuple):
    """Factors of rows that are made of choices: of T tokens, each with k."""

    values: Tensor
    """[T, k], contiguous, BF16, FP16 or FP32."""

    choices: Tensor
    """int32 [M]: the place among T k weights of each row's; -1: a row of zeros, which has none."""

    def by_row(self) -> Tensor:
        """Return the factor of each row, float32 [M, 1]."""
        # -1 takes the last, which is a zero
        return F.pad(self.values.flatten().float(), (0, 1))[self.choices].unsqueeze(1)


class Activated(NamedTuple):
    """Results of `activate`."""

    y: Tensor
    """[M, F]"""

    amax: Tensor
    """float32, whose largest entry is the amax of y."""

    x: GroupCodes | None
    up: GroupCodes | None
    """What it read in 8 bits; None where that was not asked for."""


@operator()
def activate(
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    encoded: bool = False,
    weights: RowWeights | None = None,
) -> Activated:
    """Return the activation of x, times `up`.

    Args:
        x: [M, F], each row contiguous, BF16, FP16 or FP32; or as an earlier call encoded it.
        up: as x; None multiplies by nothing.
        kind: one of `KINDS`.
        encoded: give x and up in 8 bits too.
        weights: of the M rows; None multiplies by nothing.
    """
    y = _value(values_of(x), kind)
    y = y if up is None else y * values_of(up)
    y = (y if weights is None else y * weights.by_row()).to(x.dtype)
    codes = [None if each is None or not encoded else encode_groups(each) for each in (x, up)]
    return Activated(y, amax_of(y), *codes)


@operator(rounds_to_fp8=True)
def activate_transposed(
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    amax: Tensor,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the transpose of `activate`'s y in FP8, in one pass, where y was cast before.

    Args:
        x, up, kind: as in `activate`.
        amax: what `activate` gave. What lies beyond it, as of codes, saturates.
        dtype, power_of_two: as in `kernels.cast.cast`.

    Returns:
        ([F16, M16], inverse scale of shape []), as `kernels.cast.cast` gives them.
    """
    y = activate.reference(x, up, kind=kind).y
    return cast(y, dtype, plain=False, transposed=True, power_of_two=power_of_two, amax=amax)[1:]


@operator()
def activate_backward(
    dy: Tensor,
    x: Tensor | GroupCodes,
    up: Tensor | GroupCodes | None = None,
    *,
    kind: str = "silu",
    weights: RowWeights | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x and up, side by side, and of the weights.

    Args:
        dy: [M, F], contiguous.
        x, up, kind: as in `activate`.
        weights: as in `activate`; each has one row, or none and a gradient of zero.

    Returns:
        ([M, 2 F]: of x, then of up, or [M, F] without up; float32, whose largest entry is its amax; [T, k] of the
        weights' dtype, or None without weights).
    """
    y, slope = _value_and_slope(values_of(x), kind)  # f(x) again: forward keeps x, not this
    dy, dweights = dy.float(), None
    if weights is not None:
        values, choices = weights
        by_row = (dy * (y if up is None else y * values_of(up))).sum(1)
        count = values.numel()
        # rows without a weight go behind the last
        places = choices.masked_fill(choices < 0, count).long()
        dweights = by_row.new_zeros(count + 1).index_copy_(0, places, by_row)[:count]
        dweights = dweights.view(values.shape).to(values.dtype)
        dy = dy * weights.by_row()
    dx = dy * slope if up is None else torch.cat([dy * values_of(up) * slope, dy * y], 1)
    dx = dx.to(x.dtype)
    return dx, amax_of(dx), dweights


def _value(x: Tensor, kind: str) -> Tensor:
    """Return f(x)."""
    if kind == "gelu":
        return x * _gaussian_share(x)
    return x / (1 + (-_exponent(x, kind)).exp())


def _value_and_slope(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return f(x) and its derivative."""
    if kind == "gelu":
        share = _gaussian_share(x)
        return x * share, share + x * (x.square() / -2).exp() / math.sqrt(2 * math.pi)
    sigmoid = 1 / (1 + (-_exponent(x, kind)).exp())  # f' = s + x s (1 - s) z'
    y = x * sigmoid
    slope = y * (1 - sigmoid)
    return y, sigmoid + (slope if kind == "silu" else slope * (LINEAR * (1 + 3 * CUBIC * x.square())))


def _gaussian_share(x: Tensor) -> Tensor:
    """Return the part of a normal distribution that is less than x."""
    return (1 + (x * math.sqrt(0.5)).erf()) / 2


def _exponent(x: Tensor, kind: str) -> Tensor:
    """Return z, where f(x) = x s(z)."""
    return x if kind == "silu" else LINEAR * (x + CUBIC * x**3)

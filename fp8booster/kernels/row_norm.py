"""Normalisation of rows, with the residual's addition before it.

    h = x + residual                     rounded to their dtype, as the next block adds to it
    y = c / rms(c) * w + bias            rms(c) = sqrt(mean(c**2) + eps), in FP32, rounded once

RMS norm (Zhang and Sennrich, arXiv 1910.07467, equation 4): c = h, without a bias. Layer norm (Ba, Kiros and Hinton,
arXiv 1607.06450, equation 3): c = h - mean(h). w is the weight, or 1 + weight where it is kept as what it differs by
from 1, as Gemma's is. Rows of several kinds that take turns, as the heads of tokens, may each have a weight of theirs.

On a GPU each way is one launch that reads and writes every tensor once and delivers the amax of what it makes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.cast import cast
from fp8booster.kernels.group_codes import GroupCodes, encode_groups, values_of
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of


class Normalized(NamedTuple):
    """Results of `row_norm` for M rows."""

    y: Tensor
    """[M, K]"""

    h: Tensor
    """[M, K]: x plus the residual, or x itself without one."""

    inverse_rms: Tensor
    """float32 [M]: 1 / rms(c), for the backward."""

    amax: Tensor
    """float32, whose largest entry is the amax of y."""

    encoded: GroupCodes | None
    """h in 8 bits; None where that was not asked for."""


class NormGradients(NamedTuple):
    """Results of `row_norm_backward`."""

    dx: Tensor
    """[M, K]: of x, and of the residual."""

    dweight: Tensor
    """Of the weight's shape and dtype."""

    dbias: Tensor | None
    """As dweight; None where there is no bias."""

    amax: Tensor
    """float32, whose largest entry is the amax of dx."""


@operator()
def row_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    centered: bool = False,
    unit_offset: bool = False,
    encoded: bool = False,
) -> Normalized:
    """Normalise the rows of `x + residual`.

    Args:
        x: [M, K], contiguous, BF16, FP16 or FP32.
        weight: [K]; or [G, K], and row m is multiplied by row m % G of it, with G a divisor of M.
        eps: added to the mean square.
        residual: as x, or None.
        bias: as the weight, or None.
        centered: subtract each row's mean first.
        unit_offset: multiply by 1 + weight.
        encoded: give h in 8 bits too.
    """
    h = x if residual is None else x + residual
    # of h as it was rounded: backward and the next block read that
    values = _centered(h.float(), centered)
    inverse_rms = 1.0 / (values.square().mean(-1) + eps).sqrt()
    y = _by_kind(values * inverse_rms[:, None], weight) * _factors(weight, unit_offset)
    y = (y if bias is None else y + bias.float()).to(x.dtype).view(x.shape)
    return Normalized(y, h, inverse_rms, amax_of(y), encode_groups(h) if encoded else None)


@operator(rounds_to_fp8=True)
def row_norm_transposed(
    h: Tensor | GroupCodes,
    weight: Tensor,
    inverse_rms: Tensor,
    *,
    unit_offset: bool = False,
    amax: Tensor,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the transpose of an RMS norm's y in FP8, in one pass, where y was cast before.

    Args:
        h: of `Normalized`, or its codes.
        weight: [K].
        inverse_rms, amax: of `Normalized`. What lies beyond the amax, as of codes, saturates.
        unit_offset: as in `row_norm`.
        dtype, power_of_two: as in `kernels.cast.cast`.

    Returns:
        ([K16, M16], inverse scale of shape []), as `kernels.cast.cast` gives them.
    """
    y = values_of(h) * inverse_rms[:, None] * _factors(weight, unit_offset)
    return cast(y.to(h.dtype), dtype, plain=False, transposed=True, power_of_two=power_of_two, amax=amax)[1:]


@operator()
def row_norm_backward(
    dy: Tensor,
    h: Tensor | GroupCodes,
    weight: Tensor,
    inverse_rms: Tensor,
    dh: Tensor | None = None,
    *,
    centered: bool = False,
    unit_offset: bool = False,
    biased: bool = False,
) -> NormGradients:
    """Return the gradients of the arguments of `row_norm`.

    Args:
        dy: [M, K], contiguous: the gradient of y.
        h: as there, in 8 bits or not.
        weight, inverse_rms, centered, unit_offset: as there.
        dh: the gradient of h from elsewhere, contiguous, or None.
        biased: give the bias's gradient too.
    """
    normal = _centered(values_of(h), centered) * inverse_rms[:, None]
    weighted = (_by_kind(dy.float(), weight) * _factors(weight, unit_offset)).view(dy.shape)
    # less its part along the row itself, which a norm takes out, and its mean, where the row's was taken off
    dx = inverse_rms[:, None] * (_centered(weighted, centered) - normal * (weighted * normal).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.float()
    dweight = _by_kind(dy.float() * normal, weight).sum(0).to(weight.dtype)
    dbias = _by_kind(dy.float(), weight).sum(0).to(weight.dtype) if biased else None
    dx = dx.to(h.dtype)
    return NormGradients(dx, dweight, dbias, amax_of(dx))


def _centered(values: Tensor, centered: bool) -> Tensor:
    return values - values.mean(-1, keepdim=True) if centered else values


def _by_kind(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows whose last dimensions are the weight's."""
    return rows.view(-1, *weight.shape)


def _factors(weight: Tensor, unit_offset: bool) -> Tensor:
    return 1 + weight.float() if unit_offset else weight.float()

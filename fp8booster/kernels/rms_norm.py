"""RMS normalisation (Zhang and Sennrich, arXiv 1910.07467, equation 4) with the residual's addition before it.

    h = x + residual                     rounded to their dtype, as the next block adds to it
    y = h / rms(h) * weight              rms(h) = sqrt(mean(h**2) + eps), in FP32, rounded once

On a GPU each way is one launch that reads and writes every tensor once and delivers the amax of what it makes.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp8booster.kernels.group_codes import GroupCodes, encode_groups, values_of
from fp8booster.kernels.operators import operator
from fp8booster.scaling import amax_of


class Normalized(NamedTuple):
    """What `rms_norm` gives for M rows."""

    y: Tensor
    """[M, K]"""

    h: Tensor
    """[M, K]: x plus the residual, or x itself without one."""

    inverse_rms: Tensor
    """float32 [M], for the backward."""

    amax: Tensor
    """float32, whose largest entry is the amax of y."""

    encoded: GroupCodes | None
    """h in 8 bits; None where that was not asked for."""


class NormGradients(NamedTuple):
    """What `rms_norm_backward` gives."""

    dx: Tensor
    """[M, K]: of x, and of the residual."""

    dweight: Tensor
    """[K], of the weight's dtype."""

    amax: Tensor
    """float32, whose largest entry is the amax of dx."""


@operator()
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, encoded: bool = False
) -> Normalized:
    """Normalise the rows of `x + residual`.

    Args:
        x: [M, K], contiguous, BF16, FP16 or FP32.
        weight: [K].
        eps: added to the mean square.
        residual: as x, or None.
        encoded: give h in 8 bits too.
    """
    h = x if residual is None else x + residual
    values = h.float()
    inverse_rms = 1.0 / (values.square().mean(-1) + eps).sqrt()
    y = (values * inverse_rms[:, None] * weight.float()).to(x.dtype)
    return Normalized(y, h, inverse_rms, amax_of(y), encode_groups(h) if encoded else None)


@operator()
def rms_norm_backward(
    dy: Tensor, h: Tensor | GroupCodes, weight: Tensor, inverse_rms: Tensor, dh: Tensor | None = None
) -> NormGradients:
    """Gradients of what `rms_norm` was given.

    Args:
        dy: [M, K], contiguous: the gradient of y.
        h: as there, in 8 bits or not.
        weight, inverse_rms: as there.
        dh: the gradient of h from elsewhere, contiguous, or None.
    """
    normal = values_of(h) * inverse_rms[:, None]
    weighted = dy.float() * weight.float()
    dx = inverse_rms[:, None] * (weighted - normal * (weighted * normal).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.float()
    dweight = (dy.float() * normal).sum(0).to(weight.dtype)
    dx = dx.to(h.dtype)
    return NormGradients(dx, dweight, amax_of(dx))

"""RMS norm with the residual's addition, differentiable, delivering amax to the casts that follow."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8booster.kernels import rms_norm as kernel
from fp8booster.nn.linear.delivered_amax import deliver_amax
from fp8booster.nn.linear.functional import unsafe_view


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        added = None if residual is None else residual.reshape(rows.shape).contiguous()
        y, h, inverse_rms, amax = kernel.rms_norm(rows, weight, eps, added)
        ctx.save_for_backward(h, weight, inverse_rms)
        ctx.set_materialize_grads(False)
        ctx.has_residual = residual is not None
        h = x.view_as(x) if residual is None else h.view(x.shape)
        return deliver_amax(unsafe_view(y, x.shape), amax), h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dh: torch.Tensor | None) -> tuple:
        h, weight, inverse_rms = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return dh, None, None, dh if ctx.has_residual else None
        shape = dy.shape
        dx, dweight, amax = kernel.rms_norm_backward(
            dy.reshape(h.shape).contiguous(),
            h,
            weight,
            inverse_rms,
            None if dh is None else dh.reshape(h.shape).contiguous(),
        )
        dx = deliver_amax(dx.view(shape), amax)
        return dx, dweight, None, dx if ctx.has_residual else None


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise `h = x + residual`; see `kernels.rms_norm`.

    Args:
        x: [..., K], BF16, FP16 or FP32.
        weight: [K].
        eps: added to the mean square.
        residual: of x's shape; None adds nothing.

    Returns:
        (y, h), of x's shape, and of the dtype that the sum has. A block that adds to h later should take this one, not
        x: then the gradients of both meet in one kernel.
    """
    if residual is not None and residual.dtype != x.dtype:
        # under autocast: a block's output has 16 bits, and what it is added to may have 32
        dtype = torch.promote_types(x.dtype, residual.dtype)
        x, residual = x.to(dtype), residual.to(dtype)
    return _RMSNorm.apply(x, weight, eps, residual)

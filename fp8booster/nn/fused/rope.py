"""q, k and v out of the one product that gives them, rotated, differentiable; see `kernels.rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fp8booster.kernels import rope as kernel
from fp8booster.nn.linear.delivered_amax import deliver_amax
from fp8booster.nn.linear.functional import unaliased


class _SplitAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, query_heads: int, key_heads: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        heads = unaliased(qkv).view(*qkv.shape[:2], query_heads + 2 * key_heads, -1)
        # in place: nothing that made qkv reads it again
        kernel.rotate(heads, cos, sin, query_heads + key_heads)
        return heads.split([query_heads, key_heads, key_heads], 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple:
        gradients = [gradient if gradient.stride(-1) == 1 else gradient.contiguous() for gradient in (dq, dk, dv)]
        dqkv, amax = kernel.rotate_back(*gradients, *ctx.saved_tensors)
        return deliver_amax(dqkv.flatten(2), amax), None, None, None, None


def split_and_rotate(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, query_heads: int, key_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of q, k and v, after q and k were rotated in place.

    Args:
        qkv: [B, S, (query_heads + 2 key_heads) * D], just computed: nothing else may read it.
        cos, sin: [1 or B, S, D].
        query_heads, key_heads: heads of q, and of k and v each.

    Returns:
        q [B, S, query_heads, D], k and v [B, S, key_heads, D].
    """
    return _SplitAndRotate.apply(qkv, cos.contiguous(), sin.contiguous(), query_heads, key_heads)

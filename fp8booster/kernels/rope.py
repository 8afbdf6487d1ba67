"""Rotary position embedding (Su et al., arXiv 2104.09864, equation 34, in the half-split form of LLaMA) on q, k and v
that lie in one tensor, as one product of the three gives them.

    x = (x1, x2)        a head's halves
    y = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)

Forward rotates q and k where they lie. Backward takes the gradients of q, k and v, rotates the first two back and lays
all three side by side: the gradient of the one tensor, with its amax. `rotate` and `rotate_back` are the entries; the
`*_reference` functions define what they compute.
"""

from __future__ import annotations

import torch

from fp8booster.kernels.device import runs_triton
from fp8booster.scaling import amax_of


def rotate(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of every token, in place.

    Args:
        qkv: [B, S, H, D], contiguous: heads of q, then of k, then of v.
        cos, sin: [1 or B, S, D], contiguous.
        heads: of q and k together.
    """
    if runs_triton(qkv):
        from fp8booster.kernels.rope_triton import rotate_triton

        rotate_triton(qkv, cos, sin, heads)
        torch.autograd.graph.increment_version(qkv)
    else:
        rotate_reference(qkv, cos, sin, heads)


def rotate_back(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of `qkv` from those of what it was split into after `rotate`.

    Args:
        dq: [B, S, Hq, D], any strides with contiguous heads.
        dk, dv: [B, S, Hkv, D] likewise.
        cos, sin: as in `rotate`.

    Returns:
        ([B, S, Hq + 2 Hkv, D]; float32, whose largest entry is its amax).
    """
    if runs_triton(dq):
        from fp8booster.kernels.rope_triton import rotate_back_triton

        return rotate_back_triton(dq, dk, dv, cos, sin)
    return rotate_back_reference(dq, dk, dv, cos, sin)


def rotate_reference(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> None:
    """What `rotate` computes, in torch."""
    part = qkv[:, :, :heads]
    x1, x2 = part.float().chunk(2, -1)
    cos1, cos2 = cos.float().unsqueeze(2).chunk(2, -1)
    sin1, sin2 = sin.float().unsqueeze(2).chunk(2, -1)
    part.copy_(torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], -1))


def rotate_back_reference(
    dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `rotate_back` computes, in torch."""
    d1, d2 = torch.cat([dq, dk], 2).float().chunk(2, -1)
    cos1, cos2 = cos.float().unsqueeze(2).chunk(2, -1)
    sin1, sin2 = sin.float().unsqueeze(2).chunk(2, -1)
    rotated = torch.cat([d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1], -1)
    dqkv = torch.cat([rotated.to(dq.dtype), dv], 2)
    return dqkv, amax_of(dqkv)

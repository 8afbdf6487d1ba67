"""Rotary position embedding (Su et al., arXiv 2104.09864, equation 34, in the half-split form of LLaMA) on q, k and v
that lie in one tensor, as one product of the three gives them.

    x = (x1, x2)        a head's halves
    y = (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2)

Forward rotates q and k where they lie. Backward takes the gradients of q, k and v, rotates the first two back and lays
all three side by side: the gradient of the one tensor, with its amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator
from fp8booster.scaling import amax_of


@operator(writes=("qkv",))
def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of every token, in place.

    Args:
        qkv: [B, S, H, D], contiguous: heads of q, then of k, then of v.
        cos, sin: [1 or B, S, D], contiguous.
        heads: of q and k together.
    """
    part = qkv[:, :, :heads]
    x1, x2 = part.float().chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = _halves(cos), _halves(sin)
    part.copy_(torch.cat([x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2], -1))


@operator()
def rotate_back(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of `qkv` from those of what it was split into after `rotate`.

    Args:
        dq: [B, S, Hq, D], any strides with contiguous heads.
        dk, dv: [B, S, Hkv, D] likewise.
        cos, sin: as in `rotate`.

    Returns:
        ([B, S, Hq + 2 Hkv, D]; float32, whose largest entry is its amax).
    """
    d1, d2 = torch.cat([dq, dk], 2).float().chunk(2, -1)
    (cos1, cos2), (sin1, sin2) = _halves(cos), _halves(sin)
    rotated = torch.cat([d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1], -1)
    dqkv = torch.cat([rotated.to(dq.dtype), dv], 2)
    return dqkv, amax_of(dqkv)


def _halves(angles: Tensor) -> tuple[Tensor, ...]:
    """Cosines or sines of a head's halves, float32 [1 or B, S, 1, D / 2] each."""
    return angles.float().unsqueeze(2).chunk(2, -1)

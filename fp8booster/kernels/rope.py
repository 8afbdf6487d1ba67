"""Rotary position embedding (Su et al., arXiv 2104.09864, equation 34) on q, k and v that lie in one tensor, as one
product of the three gives them.

    y1 = x1 cos1 - x2 sin1          (x1, x2): the halves of a head, as LLaMA has them, or its even and odd places
    y2 = x2 cos2 + x1 sin2

A head that is longer than the angles is rotated in its first places alone, or in its last, as in DeepSeek's.

The one tensor holds all heads of q, then of k, then of v; or so for each group of heads by itself, one group behind
the other, as GPT-NeoX has them.

Forward rotates q and k where they lie. Backward takes the gradients of q, k and v, rotates the first two back and lays
all three side by side: the gradient of the one tensor, with its amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of


@operator(writes=("qkv",))
def rotate(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    *,
    interleaved: bool = False,
    interleaved_angles: bool = False,
    groups: int = 1,
    last: bool = False,
) -> None:
    """Rotate the first heads of every group of every token, `heads` of them in all, in place.

    Args:
        qkv: [B, S, H, D], contiguous: heads of q, then of k, then of v, in each group.
        cos, sin: [1 or B, S, R], contiguous; R places of a head are rotated, an even number up to D.
        heads: of q and k together.
        interleaved: pairs are neighbours, not one of each half.
        interleaved_angles: so are those of the angles.
        groups: of heads, a divisor of those of q and of k.
        last: the last R places of a head are rotated, not the first.
    """
    first = qkv.shape[-1] - cos.shape[-1] if last else 0
    # a view: what is written below is written into qkv
    part = qkv.unflatten(2, (groups, -1))[:, :, :, : heads // groups, first : first + cos.shape[-1]]
    x1, x2 = _pairs(part.float(), interleaved)
    (cos1, cos2), (sin1, sin2) = (_pairs(each.float()[:, :, None, None], interleaved_angles) for each in (cos, sin))
    part.copy_(_joined(x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2, interleaved))


@operator()
def rotate_back(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    interleaved_angles: bool = False,
    groups: int = 1,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv` from those of what it was split into after `rotate`.

    Args:
        dq: [B, S, Hq, D], any strides with contiguous heads.
        dk, dv: [B, S, Hkv, D] likewise.
        cos, sin, interleaved, interleaved_angles, groups, last: as in `rotate`.

    Returns:
        ([B, S, Hq + 2 Hkv, D]; float32, whose largest entry is its amax).
    """
    dq, dk, dv = (each.unflatten(2, (groups, each.shape[2] // groups)) for each in (dq, dk, dv))
    first = dq.shape[-1] - cos.shape[-1] if last else 0
    before, part, behind = torch.cat([dq, dk], 3).tensor_split([first, first + cos.shape[-1]], -1)
    d1, d2 = _pairs(part.float(), interleaved)
    (cos1, cos2), (sin1, sin2) = (_pairs(each.float()[:, :, None, None], interleaved_angles) for each in (cos, sin))
    # the transpose of the rotation, not one by the opposite angles: the two of a pair may differ
    rotated = _joined(d1 * cos1 + d2 * sin2, d2 * cos2 - d1 * sin1, interleaved)
    dqkv = torch.cat([torch.cat([before, rotated.to(dq.dtype), behind], -1), dv], 3).flatten(2, 3)
    return dqkv, amax_of(dqkv)


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Return the first and the second of all pairs along the last dimension."""
    return (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)


def _joined(x1: Tensor, x2: Tensor, interleaved: bool) -> Tensor:
    return torch.stack([x1, x2], -1).flatten(-2) if interleaved else torch.cat([x1, x2], -1)

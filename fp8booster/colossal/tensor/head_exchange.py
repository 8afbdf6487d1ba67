"""Parts of a sequence exchanged for heads before attention, and back after it (Ulysses, arXiv 2309.14509, section 3.1).

Each rank computes q, k and v of its tokens with all heads, attends with some heads to all tokens, and goes on with its
tokens. In Colossal-AI q, k and v are three messages (shardformer/modeling/llama.py:518); where they lie in one tensor,
as one product of the three gives them, they are one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.colossal.compressed_groups import is_compressed
from fp8booster.nn.autograd import once_differentiable


def sequence_to_heads(values: torch.Tensor, heads: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """All tokens of this rank's heads, differentiable.

    Args:
        values: [B, S / n, sum of heads, D], this rank's tokens, the ranks' one behind the other in the sequence.
        heads: of the kinds that lie side by side, such as q, k and v; rank r of n gets the r-th part of each kind.
        group: the n ranks; FP8 is sent if it was given to `compress_groups`.

    Returns:
        [B, S, sum of heads / n, D], contiguous, its memory shared with nothing.

    Raises:
        ValueError: heads that cannot be shared among the ranks.
    """
    uneven = [count for count in heads if count % group.size()]
    if uneven:
        raise ValueError(
            f"{uneven[0]} attention heads cannot be shared among {group.size()} sequence parallel ranks; take an "
            "sp_size that divides the heads of queries and of keys, divided by tp_size"
        )
    return _HeadExchange.apply(values, tuple(heads), group, True)


def heads_to_sequence(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All heads of this rank's tokens, differentiable: the inverse, for one kind of heads.

    Args:
        values: [B, S, H / n, D], of any strides.
        group: as in `sequence_to_heads`.

    Returns:
        [B, S / n, H, D], contiguous.
    """
    return _HeadExchange.apply(values, (values.shape[2] * group.size(),), group, False)


class _HeadExchange(torch.autograd.Function):
    """Each direction's gradient goes the other way."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        values: torch.Tensor,
        heads: tuple[int, ...],
        group: dist.ProcessGroup,
        to_heads: bool,
    ) -> torch.Tensor:
        ctx.heads, ctx.group, ctx.to_heads = heads, group, to_heads
        return (_to_heads if to_heads else _to_sequence)(values, heads, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        way_back = _to_sequence if ctx.to_heads else _to_heads
        return way_back(gradient, ctx.heads, ctx.group), None, None, None


def _to_heads(values: torch.Tensor, heads: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    own = [count // ranks for count in heads]
    batch, tokens, _, size = values.shape
    message = values.new_empty((ranks, batch, tokens, sum(own), size))
    for into, kind in zip(message.split(own, 3), values.split(heads, 2), strict=True):
        into.copy_(kind.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    return _exchanged(message, group).transpose(0, 1).reshape(batch, ranks * tokens, sum(own), size)


def _to_sequence(values: torch.Tensor, heads: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    message = values.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    arrived = _exchanged(message, group)
    _, batch, tokens, _, size = arrived.shape
    whole = values.new_empty((batch, tokens, sum(heads), size))
    parts = arrived.split([count // ranks for count in heads], 3)
    for into, part in zip(whole.split(heads, 2), parts, strict=True):
        into.unflatten(2, (ranks, -1)).copy_(part.permute(1, 2, 0, 3, 4))
    return whole


def _exchanged(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """To each rank its part of the first dimension."""
    arrived = torch.empty_like(message)
    exchange = comm.all_to_all_single if is_compressed(group) else dist.all_to_all_single
    exchange(arrived, message, group=group)
    return arrived

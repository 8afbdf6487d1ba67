"""Attention of layers that shardformer has sharded: fused over each rank's heads, and exchanged along a sequence.

Norms, residuals and feed-forward blocks of a sharded decoder layer are transformers' own, over sharded linear layers,
and are fused as those of a whole one. An attention may have a forward of shardformer's: with `enable_flash_attention`,
and wherever the sequence is parallel. Its fused form sends what shardformer's sends: under "all_to_all" heads are
exchanged for parts of the sequence before q and k are rotated, by their places in the whole sequence; under "ring_attn"
q and k are rotated where they are. The loss is computed over chunks of logits where the model's forward is
transformers' own, and where it is shardformer's by `loss.py`.

Heads are exchanged for tokens by Ulysses (arXiv 2309.14509, section 3.1): each rank computes q, k and v of its tokens
with all heads, attends with some heads to all tokens, and goes on with its tokens. In Colossal-AI q, k and v are three
messages (shardformer/modeling/llama.py:518); where they lie in one tensor, as one product of the three gives them, they
are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import ColoAttention, PaddingLMHead
from colossalai.shardformer.layer.attn import AttnMaskType, RingAttention
from colossalai.shardformer.shard import ShardConfig
from torch import nn

from fp8booster import comm
from fp8booster.colossal.compressed_groups import encoding_of
from fp8booster.colossal.tensor.layers import FP8PaddingLMHead
from fp8booster.colossal.tensor.loss import use_sharded_loss
from fp8booster.nn.fused import fuse_model
from fp8booster.nn.fused.attention import attend_packed
from fp8booster.nn.fused.causal_lm_loss import HEADS
from fp8booster.nn.fused.decoder import REPLACED
from fp8booster.nn.fused.packing import Sequences, let_pack_around
from fp8booster.nn.fused.self_attention import FusedAttention
from fp8booster.nn.linear.functional import once_differentiable
from fp8booster.nn.parallel.ring_attention import ring_attention

_FLASH_FORWARDS = tuple(
    f"get_{family}_flash_attention_forward.<locals>.forward" for family in ("llama", "mistral", "qwen2", "qwen3")
)
"""Names of shardformer/modeling/llama.py:489, mistral.py:497 and qwen2.py:489, and of tensor/qwen3.py."""

# `nn` knows no colossalai, so its heads are made known from here
HEADS.update((PaddingLMHead, FP8PaddingLMHead))


def sequence_to_heads(values: torch.Tensor, heads: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return all tokens of this rank's heads, differentiable.

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
    """Return all heads of this rank's tokens, differentiable: the inverse, for one kind of heads.

    Args:
        values: [B, S, H / n, D], of any strides.
        group: as in `sequence_to_heads`.

    Returns:
        [B, S / n, H, D], contiguous.
    """
    return _HeadExchange.apply(values, (values.shape[2] * group.size(),), group, False)


class _HeadExchange(torch.autograd.Function):
    """An exchange whose gradient goes the other way."""

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
    # one contiguous part for each rank, so that nothing is copied again to be sent
    message = values.new_empty((ranks, batch, tokens, sum(own), size))
    for into, kind in zip(message.split(own, 3), values.split(heads, 2), strict=True):
        into.copy_(kind.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4))
    # parts arrive in the order of ranks, which is that of the sequence
    return _exchanged(message, group).transpose(0, 1).reshape(batch, ranks * tokens, sum(own), size)


def _to_sequence(values: torch.Tensor, heads: tuple[int, ...], group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    message = values.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    arrived = _exchanged(message, group)
    _, batch, tokens, _, size = arrived.shape
    whole = values.new_empty((batch, tokens, sum(heads), size))
    # rank r sends the r-th part of each kind of heads: the kinds are put together apart from each other
    parts = arrived.split([count // ranks for count in heads], 3)
    for into, part in zip(whole.split(heads, 2), parts, strict=True):
        into.unflatten(2, (ranks, -1)).copy_(part.permute(1, 2, 0, 3, 4))
    return whole


def _exchanged(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send each rank its part of the first dimension."""
    arrived = torch.empty_like(message)
    encoding = encoding_of(group)
    if encoding is None:
        dist.all_to_all_single(arrived, message, group=group)
    else:
        comm.all_to_all_single(arrived, message, group=group, encoding=encoding)
    return arrived


def attend_in_ring(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sp_axis: int,
    attention_mask_type: AttnMaskType,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    valid_indices: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_softmax: bool = False,
    inner_ring_size: int | None = None,
    pg_mesh: Any = None,
    **_: Any,
) -> Any:
    """Run `RingAttention.attention` (shardformer/layer/attn.py:496); compressed groups send keys and values in FP8.

    `inner_ring_size`, which lets Colossal-AI go round in two rings, changes what is sent when and not the result: there
    is one ring here. `max_seqlen` and `deterministic` serve Colossal-AI's kernels.

    Args:
        q: [B, H, S, D], padded at the end of each sequence.
        k, v: [B, Hkv, S, D] likewise, with the heads of q, as in Colossal-AI, or a divisor of them, which sends less.
        cu_seqlens: [B + 1], where this rank's sequences begin and end, with PADDED_CAUSAL.
        valid_indices: [tokens], which of this rank's tokens are not padding, with PADDED_CAUSAL.
        return_softmax: return the log-sum-exp of the scores too, [B * S, H].

    Raises:
        ValueError: another mask, or dropout.
    """
    if attention_mask_type not in RingAttention.SUPPORTED_MASK_TYPES:
        raise ValueError(f"ring attention is causal; {attention_mask_type} is not there for it")
    if dropout_p:
        raise ValueError(f"ring attention has no dropout; set attention_dropout={dropout_p} to 0")
    group = pg_mesh.get_group_along_axis(sp_axis)
    lengths = None
    # a number of tokens is known without waiting for the GPU, their lengths are not
    if attention_mask_type == AttnMaskType.PADDED_CAUSAL and valid_indices.numel() < q.shape[0] * q.shape[2]:
        lengths = cu_seqlens.diff().tolist()
    output, lse = ring_attention(q, k, v, group, lengths=lengths, scale=softmax_scale, encoding=encoding_of(group))
    return (output, lse.transpose(1, 2).flatten(0, 1)) if return_softmax else output


class FlashAttention(FusedAttention):
    """Mixin of a self-attention that runs by `ColoAttention`, on all tokens of this rank's heads."""

    fp8_forward_of_engine: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    """Shardformer's."""

    fp8_sharding: Callable[[], ShardConfig]
    """With sequence parallelism. A function: copies of a model copy what modules hold, and groups cannot be copied."""

    def why_unlike(self, *, attention_mask: Any = None, **_: Any) -> str | None:
        # what the model makes for `ColoAttention` is a dictionary
        return None if isinstance(attention_mask, dict) else "its attention_mask is not one for ColoAttention"

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: dict[str, Any]
    ) -> torch.Tensor:
        # as shardformer's, which repeats the heads of keys and values and drops nothing out
        return ColoAttention.attention(query, *self.repeated(key, value), **attention_mask)

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        return attend_packed(query, key, value, sequences)

    def repeated(self, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return heads of keys or values, [B, Hkv, S, D], each as often as queries share it."""
        groups = self.num_key_value_groups
        return heads if groups == 1 else tuple(each.repeat_interleave(groups, 1) for each in heads)

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.fp8_forward_of_engine(*args, **kwargs)


class AllToAllAttention(FlashAttention):
    """Mixin of one whose ranks hold parts of the sequence, and attend with parts of the heads."""

    def before_attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Return all tokens of this rank's heads, in one message."""
        key_heads = self.key_heads_in(qkv)
        kinds = key_heads * self.num_key_value_groups, key_heads, key_heads
        heads = qkv.unflatten(2, (-1, self.head_dim))
        group = self.fp8_sharding().sequence_parallel_process_group
        return sequence_to_heads(heads, kinds, group).flatten(2)

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        return heads_to_sequence(attended, self.fp8_sharding().sequence_parallel_process_group)


class RingedAttention(FlashAttention):
    """Mixin of one whose ranks hold parts of the sequence, and pass keys and values on in a ring."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: dict[str, Any]
    ) -> torch.Tensor:
        # as shardformer's; in compressed groups, whose ring is ours, heads that queries share are sent once
        config = self.fp8_sharding()
        if encoding_of(config.sequence_parallel_process_group) is None:
            key, value = self.repeated(key, value)
        return RingAttention.attention(
            query,
            key,
            value,
            sp_axis=config.sp_axis,
            **attention_mask,
            inner_ring_size=config.inner_ring_size,
            pg_mesh=config.pg_mesh,
        )

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        group = self.fp8_sharding().sequence_parallel_process_group
        encoding = encoding_of(group)
        return ring_attention(query, key, value, group, boundaries=sequences.on_host, encoding=encoding)[0]


_MIXINS = {"all_to_all": AllToAllAttention, "ring_attn": RingedAttention}
"""By mode of sequence parallelism; in the others a rank attends to all tokens that its layers gather."""


def fuse_sharded(model: nn.Module, config: ShardConfig) -> str:
    """Fuse what can be fused of a model that shardformer sharded and whose layers were converted to FP8, in place.

    Args:
        model: this rank's part of it.
        config: by which it was sharded.

    Returns:
        What was fused and what was not, in a line.
    """

    def replaced_attention(attention: nn.Module) -> type[FusedAttention] | str:
        forward = attention.forward
        if getattr(forward, "__qualname__", None) not in _FLASH_FORWARDS:
            return REPLACED
        # shardformer put it on the instance, where it would hide the forward of a mixin
        del attention.forward
        attention.fp8_forward_of_engine = forward
        if not config.enable_sequence_parallelism:  # Mistral's policy turns it off, and leaves the mode
            return FlashAttention
        attention.fp8_sharding = lambda: config
        return _MIXINS.get(config.sequence_parallelism_mode, FlashAttention)

    use_sharded_loss(model, config)
    summary = fuse_model(model, replaced_attention)
    let_pack_around(model)
    return summary

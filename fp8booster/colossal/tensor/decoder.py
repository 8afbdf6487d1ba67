"""Decoder layers that shardformer has sharded, fused: `nn.fused` over each rank's heads and features.

Its norms, residuals and feed-forward blocks are transformers' own, over sharded linear layers. An attention may have a
forward of shardformer's: with `enable_flash_attention`, and wherever the sequence is parallel. Its fused form sends
what shardformer's sends: under "all_to_all" heads are exchanged for parts of the sequence before q and k are rotated,
by their places in the whole sequence; under "ring_attn" q and k are rotated where they are. The loss is computed
over chunks of logits where the model's forward is transformers' own, and where it is shardformer's by `loss.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from colossalai.shardformer.layer import ColoAttention, PaddingLMHead
from colossalai.shardformer.layer.attn import RingAttention
from colossalai.shardformer.shard import ShardConfig
from torch import nn

from fp8booster.colossal.compressed_groups import is_compressed
from fp8booster.colossal.tensor.head_exchange import heads_to_sequence, sequence_to_heads
from fp8booster.colossal.tensor.layers import FP8PaddingLMHead
from fp8booster.colossal.tensor.loss import use_sharded_loss
from fp8booster.nn.fused import fuse
from fp8booster.nn.fused.attention import attend_packed
from fp8booster.nn.fused.decoder import REPLACED
from fp8booster.nn.fused.head import HEADS
from fp8booster.nn.fused.packing import Sequences, let_pack_around
from fp8booster.nn.fused.self_attention import FusedAttention
from fp8booster.nn.parallel.ring_attention import ring_attention

_FLASH_FORWARDS = tuple(
    f"get_{family}_flash_attention_forward.<locals>.forward" for family in ("llama", "mistral", "qwen2", "qwen3")
)
"""Of shardformer/modeling/llama.py:489, mistral.py:497 and qwen2.py:489, and of tensor/qwen3.py."""

HEADS.update((PaddingLMHead, FP8PaddingLMHead))


class FlashAttention(FusedAttention):
    """Mixin of a self-attention that runs by `ColoAttention`, on all tokens of this rank's heads."""

    fp8_forward_of_engine: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    """Shardformer's."""

    fp8_sharding: Callable[[], ShardConfig]
    """With sequence parallelism. A function: copies of a model copy what modules hold, and groups cannot be copied."""

    def why_unlike(self, *, attention_mask: Any = None, **_: Any) -> str | None:
        """What the model makes for `ColoAttention` is a dictionary."""
        return None if isinstance(attention_mask, dict) else "its attention_mask is not one for ColoAttention"

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: dict[str, Any]
    ) -> torch.Tensor:
        """As shardformer's, which repeats the heads of keys and values and drops nothing out."""
        return ColoAttention.attention(query, *self.repeated(key, value), **attention_mask)

    def attend_packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: Sequences
    ) -> torch.Tensor:
        """As `attend`: without dropout or a window."""
        return attend_packed(query, key, value, sequences)

    def repeated(self, *heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Heads of keys or values, [B, Hkv, S, D], each as often as queries share it."""
        groups = self.num_key_value_groups
        return heads if groups == 1 else tuple(each.repeat_interleave(groups, 1) for each in heads)

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Shardformer's forward."""
        return self.fp8_forward_of_engine(*args, **kwargs)


class AllToAllAttention(FlashAttention):
    """Mixin of one whose ranks hold parts of the sequence, and attend with parts of the heads."""

    def before_attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads, in one message."""
        key_heads = self.key_heads_in(qkv)
        kinds = key_heads * self.num_key_value_groups, key_heads, key_heads
        heads = qkv.unflatten(2, (-1, self.head_dim))
        group = self.fp8_sharding().sequence_parallel_process_group
        return sequence_to_heads(heads, kinds, group).flatten(2)

    def after_attention(self, attended: torch.Tensor) -> torch.Tensor:
        """All heads of this rank's tokens."""
        return heads_to_sequence(attended, self.fp8_sharding().sequence_parallel_process_group)


class RingedAttention(FlashAttention):
    """Mixin of one whose ranks hold parts of the sequence, and pass keys and values on in a ring."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: dict[str, Any]
    ) -> torch.Tensor:
        """As shardformer's; in compressed groups, whose ring is ours, heads that queries share are sent once."""
        config = self.fp8_sharding()
        if not is_compressed(config.sequence_parallel_process_group):
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
        communication = is_compressed(group)
        return ring_attention(query, key, value, group, boundaries=sequences.on_host, communication=communication)[0]


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
        del attention.forward
        attention.fp8_forward_of_engine = forward
        if not config.enable_sequence_parallelism:  # Mistral's policy turns it off, and leaves the mode
            return FlashAttention
        attention.fp8_sharding = lambda: config
        return _MIXINS.get(config.sequence_parallelism_mode, FlashAttention)

    use_sharded_loss(model, config)
    summary = fuse(model, replaced_attention)
    let_pack_around(model)
    return summary

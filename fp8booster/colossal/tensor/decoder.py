"""Decoder layers that shardformer has sharded, fused: `nn.fused` over each rank's heads and features.

Its norms, residuals and feed-forward blocks are transformers' own, over sharded linear layers. An attention may have a
forward of shardformer's: with `enable_flash_attention`, and wherever the sequence is parallel. The loss is computed
over chunks of logits where the model's forward is transformers' own: that of a LLaMA or Mistral which is not sharded.
"""

from __future__ import annotations

from typing import Any

import torch
from colossalai.shardformer.layer import ColoAttention, PaddingLMHead
from colossalai.shardformer.layer.utils import is_share_sp_tp
from colossalai.shardformer.shard import ShardConfig
from torch import nn

from fp8booster.colossal.tensor.linear import FP8PaddingLMHead
from fp8booster.nn.fused import fuse
from fp8booster.nn.fused.causal_lm_loss import HEADS
from fp8booster.nn.fused.decoder import REPLACED, FusedAttention

_FLASH_FORWARDS = tuple(
    f"get_{family}_flash_attention_forward.<locals>.forward" for family in ("llama", "mistral", "qwen2")
)
"""Of shardformer/modeling/llama.py:489, mistral.py:497 and qwen2.py:489."""

HEADS.update((PaddingLMHead, FP8PaddingLMHead))


class FlashAttention(FusedAttention):
    """Mixin of a self-attention that runs by `ColoAttention`."""

    def attends_alike(self, attention_mask: Any, **_: Any) -> bool:
        """What the model makes for `ColoAttention` is a dictionary."""
        return isinstance(attention_mask, dict)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: dict[str, Any]
    ) -> torch.Tensor:
        """As shardformer's, which repeats the heads of keys and values and drops nothing out."""
        if self.num_key_value_groups > 1:
            key, value = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (key, value))
        return ColoAttention.attention(query, key, value, **attention_mask)

    def forward_unfused(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Shardformer's forward."""
        return self.fp8_forward_of_engine(*args, **kwargs)


def fuse_sharded(model: nn.Module, config: ShardConfig) -> str:
    """Fuse what can be fused of a model that shardformer sharded and whose layers were converted to FP8, in place.

    Args:
        model: this rank's part of it.
        config: by which it was sharded.

    Returns:
        What was fused and what was not, in a line.
    """

    def attention_of(attention: nn.Module) -> type[FusedAttention] | str:
        forward = attention.forward
        if getattr(forward, "__qualname__", None) not in _FLASH_FORWARDS:
            return REPLACED
        mode = config.sequence_parallelism_mode
        if mode is not None and not is_share_sp_tp(mode):
            return f"sequence_parallelism_mode={mode!r} has one of its own"
        del attention.forward
        attention.__dict__["fp8_forward_of_engine"] = forward
        return FlashAttention

    return fuse(model, attention_of)

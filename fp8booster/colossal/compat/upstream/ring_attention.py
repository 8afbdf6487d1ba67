"""Patches of ring attention: kernels, padding, positions, and the models that have it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.compat.upstream.attention import no_flash_attn

_ATTENTION = "shardformer.layer.attn"
_RING = 'sequence_parallelism_mode="ring_attn"'


@patch(_ATTENTION, "282-320,535", needed_when=f"{_RING} and flash-attn is not installed")
def ring_attention_runs_on_pytorch(module: ModuleType, replacements: Replacements) -> None:
    """Ring attention computes by PyTorch's own flash attention, on the CPU too.

    Without it: RuntimeError: Flash Attention is not installed.
    """

    def attention(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        from fp8booster.colossal.tensor import ring  # it imports the module that is patched

        return ring.attention(*args, **kwargs)

    if no_flash_attn(module):
        replacements.wrap(module, "RingAttention.attention", attention)
        replacements.set(module, "_load_varlen_helpers", lambda: None)


@patch(
    _ATTENTION,
    "shardformer/layer/attn.py:1226, shardformer/layer/utils.py:417",
    needed_when=f"{_RING} and a batch of sequences of different lengths",
)
def ring_attention_knows_padding(module: ModuleType, replacements: Replacements) -> None:
    """Each sequence of a padded batch has its own positions along the ring, and padding has no label.

    Without it the tokens of shorter sequences are rotated as if they stood where those of the longest do, and padding
    is trained to predict token 0.
    """

    def prepare_varlen_batch(
        upstream: Callable,
        padding_mask: torch.Tensor,
        sp_group: dist.ProcessGroup,
        inputs_embeds: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        is_label: bool = False,
        is_batched_seq: bool = True,
    ) -> tuple[torch.Tensor | None, dict[str, Any], torch.Tensor | None]:
        inputs, info, positions = upstream(
            padding_mask, sp_group, inputs_embeds, position_ids, is_label, is_batched_seq
        )
        if is_label and is_batched_seq:
            labels = torch.full_like(inputs, -100).flatten()
            valid = info["valid_indices"]
            labels[valid] = inputs.flatten()[valid]
            inputs = labels.view_as(inputs)
        if position_ids is not None and is_batched_seq:
            longest, ends = module.get_pad_info(padding_mask, return_indices=False)
            whole = position_ids.expand(padding_mask.shape)[:, :longest]
            positions = module.split_varlen_zigzag(whole, ends, sp_group, longest, is_batched_seq=True)
        return inputs, info, positions

    if "index_select" in module.RingAttention.prepare_varlen_batch.__code__.co_names:
        replacements.wrap(module, "RingAttention.prepare_varlen_batch", prepare_varlen_batch)


@patch(
    _ATTENTION,
    "shardformer/modeling/llama.py:323,326, shardformer/modeling/gpt2.py:410,412",
    needed_when=f"{_RING} and no labels",
)
def rings_need_no_labels(module: ModuleType, replacements: Replacements) -> None:
    """Models with ring attention give the logits of this rank's tokens, as they do with labels.

    Without it TypeError: 'NoneType' object is not iterable.
    """

    def prepare_varlen_batch(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(upstream).bind(*args, **kwargs).arguments
        labels = given.get("inputs_embeds")
        if given.get("is_label") and not isinstance(labels, torch.Tensor):
            return labels, {}, None
        return upstream(*args, **kwargs)

    def split_batch_zigzag(upstream: Callable, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return upstream(batch, *args, **kwargs) if isinstance(batch, (torch.Tensor, list)) else batch

    replacements.wrap(module, "RingAttention.prepare_varlen_batch", prepare_varlen_batch)
    replacements.wrap(inspect.getmodule(module.split_varlen_zigzag), "split_batch_zigzag", split_batch_zigzag)


@wrap(
    "shardformer.shard.shardformer:ShardFormer.optimize",
    "shardformer/modeling/qwen2.py:500",
    needed_when=f"{_RING} with another model than LLaMA or GPT-2",
)
def ring_attention_is_refused_where_there_is_none(
    upstream: Callable, self: Any, model: Any, *args: Any, **kwargs: Any
) -> Any:
    """`ring_attn` is refused for models whose attention does not run in a ring, with the modes that they have.

    Without it the first forward raises AssertionError: Invalid sp_mode, or an error about sizes that do not fit.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if self.shard_config.sequence_parallelism_mode == "ring_attn" and kind not in ("llama", "gpt2"):
        raise ValueError(
            f"{type(model).__name__} has no ring attention: it is there for LLaMA and GPT-2; use "
            "sequence_parallelism_mode='split_gather' or 'all_to_all'"
        )
    return upstream(self, model, *args, **kwargs)

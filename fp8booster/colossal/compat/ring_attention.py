"""Mends of ring attention: kernels, padding, and the models that have it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.attention import ATTENTION, has_flash_attn
from fp8booster.colossal.compat.registry import Patch, mend


@mend(
    module=ATTENTION,
    place="shardformer/layer/attn.py:282-320,535",
    needed_when='sequence_parallelism_mode="ring_attn" and flash-attn is not installed',
)
def ring_attention_runs_on_pytorch(module: ModuleType, patch: Patch) -> None:
    """Ring attention computes by PyTorch's own flash attention, on the CPU too.

    Without it: RuntimeError: Flash Attention is not installed. No longer needed when
    `RingAttention.prepare_varlen_batch` and `.attention` run without the flash-attn package.
    """
    if has_flash_attn():
        return

    def attention(*args: Any, **kwargs: Any) -> Any:
        from fp8booster.colossal.tensor import ring  # it imports the module that is mended

        return ring.attention(*args, **kwargs)

    patch.set(module.RingAttention, "attention", staticmethod(attention))
    patch.set(module, "_load_varlen_helpers", lambda: None)


@mend(
    module=ATTENTION,
    place="shardformer/layer/attn.py:1226, shardformer/layer/utils.py:417",
    needed_when='sequence_parallelism_mode="ring_attn" and a batch of sequences of different lengths',
)
def ring_attention_knows_padding(module: ModuleType, patch: Patch) -> None:
    """Each sequence of a padded batch has its own positions along the ring, and padding has no label.

    Without it the tokens of shorter sequences are rotated as if they stood where those of the longest do, and padding
    is trained to predict token 0. No longer needed when `RingAttention.prepare_varlen_batch` gives position ids of
    [batch, length], and labels of -100 for padding.
    """
    upstream = module.RingAttention.prepare_varlen_batch
    if "index_select" not in upstream.__code__.co_names:
        return

    def prepare_varlen_batch(
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

    patch.set(module.RingAttention, "prepare_varlen_batch", staticmethod(prepare_varlen_batch))


@mend(
    module="colossalai.shardformer.shard.shardformer",
    place="shardformer/modeling/qwen2.py:500",
    needed_when='sequence_parallelism_mode="ring_attn" with another model than LLaMA or GPT-2',
)
def ring_attention_is_refused_where_there_is_none(module: ModuleType, patch: Patch) -> None:
    """`ring_attn` is refused for models whose attention does not run in a ring, with the modes that they have.

    Without it the first forward raises AssertionError: Invalid sp_mode, or an error about sizes that do not fit. No
    longer needed when all models that take `ring_attn` train.
    """
    upstream = module.ShardFormer.optimize

    @functools.wraps(upstream)
    def optimize(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if self.shard_config.sequence_parallelism_mode == "ring_attn" and kind not in ("llama", "gpt2"):
            raise ValueError(
                f"{type(model).__name__} has no ring attention: it is there for LLaMA and GPT-2; use "
                "sequence_parallelism_mode='split_gather' or 'all_to_all'"
            )
        return upstream(self, model, *args, **kwargs)

    patch.set(module.ShardFormer, "optimize", optimize)


@mend(
    module="colossalai.shardformer.modeling.llama",
    place="shardformer/modeling/llama.py:131,153,322",
    needed_when='sequence_parallelism_mode="ring_attn" and no attention_mask',
)
def llama_rings_need_no_mask(module: ModuleType, patch: Patch) -> None:
    """LLaMA's ring attention takes a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'bool'. No longer needed when
    `LlamaPipelineForwards` runs under ring_attn without attention_mask, with a pipeline and without.
    """
    forwards = module.LlamaPipelineForwards
    for name in ("llama_model_forward", "llama_for_causal_lm_forward"):
        patch.set(forwards, name, staticmethod(_with_a_mask(getattr(forwards, name))))


@mend(
    module="colossalai.shardformer.modeling.gpt2",
    place="shardformer/modeling/gpt2.py:231,249,408",
    needed_when='sequence_parallelism_mode="ring_attn" and no attention_mask',
)
def gpt2_rings_need_no_mask(module: ModuleType, patch: Patch) -> None:
    """GPT-2's ring attention takes a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'bool'. No longer needed when `GPT2PipelineForwards`
    runs under ring_attn without attention_mask, with a pipeline and without.
    """
    forwards = module.GPT2PipelineForwards
    for name in ("gpt2_model_forward", "gpt2_lmhead_model_forward"):
        patch.set(forwards, name, staticmethod(_with_a_mask(getattr(forwards, name))))


def _with_a_mask(upstream: Callable) -> Callable:
    """A forward that is given a mask of ones where ring attention has none."""
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        config = given.arguments.get("shard_config")
        rings = config is not None and config.sequence_parallelism_mode == "ring_attn"
        if rings and given.arguments.get("attention_mask") is None:
            given.arguments["attention_mask"] = _ones(given.arguments, config.sequence_parallel_size)
        return upstream(*given.args, **given.kwargs)

    return forward


def _ones(inputs: dict[str, Any], ranks: int) -> torch.Tensor:
    """A mask, [batch, tokens of all ranks], of what a stage is given: a batch, or this rank's part of hidden states."""
    for name, parts in (("input_ids", 1), ("inputs_embeds", 1), ("hidden_states", ranks)):
        found = inputs.get(name)
        if found is not None:
            batch, tokens = found.shape[:2]
            return torch.ones(batch, tokens * parts, dtype=torch.bool, device=found.device)
    raise ValueError("a model needs input_ids or inputs_embeds; give one of them")

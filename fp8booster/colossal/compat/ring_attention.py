"""Mends of ring attention: kernels, padding, positions, and the models that have it."""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.attention import ATTENTION, has_flash_attn
from fp8booster.colossal.compat.masks import LLAMA, is_a_ring, mask_of_ones
from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


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
    module=ATTENTION,
    place="shardformer/modeling/llama.py:323,326, shardformer/modeling/gpt2.py:410,412",
    needed_when='sequence_parallelism_mode="ring_attn" and no labels',
)
def rings_need_no_labels(module: ModuleType, patch: Patch) -> None:
    """Models with ring attention give the logits of this rank's tokens, as they do with labels.

    Without it TypeError: 'NoneType' object is not iterable. No longer needed when a LLaMA under ring_attn runs without
    labels, with padding and without.
    """
    prepare = module.RingAttention.prepare_varlen_batch
    utils = sys.modules[module.split_varlen_zigzag.__module__]
    split = utils.split_batch_zigzag
    rows = inspect.signature(prepare)

    @functools.wraps(prepare)
    def prepare_varlen_batch(*args: Any, **kwargs: Any) -> Any:
        given = rows.bind(*args, **kwargs).arguments
        labels = given.get("inputs_embeds")
        if given.get("is_label") and not isinstance(labels, torch.Tensor):
            return labels, {}, None
        return prepare(*args, **kwargs)

    @functools.wraps(split)
    def split_batch_zigzag(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return split(batch, *args, **kwargs) if isinstance(batch, (torch.Tensor, list)) else batch

    patch.set(module.RingAttention, "prepare_varlen_batch", staticmethod(prepare_varlen_batch))
    patch.set_function(utils, "split_batch_zigzag", split_batch_zigzag)


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
    module=LLAMA,
    place="shardformer/modeling/llama.py:101,127,178",
    needed_when='sequence_parallelism_mode="ring_attn" in a pipeline',
)
def llama_rings_keep_positions_in_a_pipeline(module: ModuleType, patch: Patch) -> None:
    """Later stages of a pipeline rotate the tokens of a ring's ranks by their places in the whole sequence.

    Without it each rank of a later stage takes its tokens for the first of the sequence, so that distances between
    tokens of different ranks are wrong. No longer needed when `LlamaPipelineForwards.llama_model_forward`, run as two
    stages under ring_attn, gives what it gives as one.
    """
    upstream = module.LlamaPipelineForwards.llama_model_forward
    signature = inspect.signature(upstream)

    @functools.wraps(upstream)
    def llama_model_forward(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        stage, config = (given.arguments.get(name) for name in ("stage_manager", "shard_config"))
        if is_a_ring(config) and stage is not None and not stage.is_first_stage():
            mask, whole = (given.arguments.get(name) for name in ("attention_mask", "position_ids"))
            if mask is None:
                mask = mask_of_ones(given.arguments, config)
            if whole is None:
                whole = torch.arange(mask.shape[1], device=mask.device).unsqueeze(0)
            part, *_ = module.RingAttention.prepare_varlen_batch(
                mask, config.sequence_parallel_process_group, whole.expand(mask.shape)
            )
            given.arguments["position_ids"] = part
        return upstream(*given.args, **given.kwargs)

    patch.set(module.LlamaPipelineForwards, "llama_model_forward", staticmethod(llama_model_forward))

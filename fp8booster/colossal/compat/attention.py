"""Patches of attention in sharded models: causality, kernels, masks, and rings."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8booster.colossal.compat.registry import Replacements, arguments_of, by_name, patch, refuse, wrap
from fp8booster.colossal.compressed_groups import encoding_of

_ATTENTION = "shardformer.layer.attn"
_RING = 'sequence_parallelism_mode="ring_attn"'


def _no_flash_attn() -> bool:
    return importlib.util.find_spec("flash_attn") is None


def _with_flash_attention(upstream: Callable, shard_config: Any, sp_mode: str | None = None, *args: Any) -> Any:
    """Without it, and with transformers' "sdpa" attention, whose mask is None where is_causal would do, every token
    attends to those that follow.
    """
    if sp_mode is not None:
        shard_config.enable_flash_attention = True
    return upstream(shard_config, sp_mode, *args)


for _model, _lines, _along in (("llama", "143,576", "sequence"), ("qwen2", "154,574", "sequence and pipeline")):
    wrap(
        f"shardformer.modeling.{_model}:get_{_model}_flash_attention_forward",
        _lines,
        f"{_along} parallelism with enable_flash_attention=False",
        name=f"{_model}_is_causal_along_a_sequence",
    )(_with_flash_attention)


@wrap(
    "shardformer.modeling.gpt2:_get_attention_mask",
    "87-106",
    'transformers\' "sdpa" attention, its default, and enable_flash_attention=False',
)
def gpt2_is_causal(
    upstream: Callable,
    self: Any,
    shard_config: Any,
    hidden_states: torch.Tensor,
    past_key_values: Any,
    attention_mask: torch.Tensor | None,
    *encoder: Any,
) -> tuple[Any, Any]:
    """Without it transformers' "sdpa" attention is given a mask of the padding alone, and takes no causal one beside
    it: every token attends to those that follow, under tensor parallelism too.
    """
    from transformers.modeling_attn_mask_utils import _prepare_4d_causal_attention_mask_for_sdpa

    prepared = upstream(self, shard_config, hidden_states, past_key_values, attention_mask, *encoder)
    if shard_config.enable_flash_attention or self.config._attn_implementation != "sdpa":
        return prepared
    past = past_key_values[0][0].shape[2] if past_key_values and past_key_values[0] is not None else 0
    padding = attention_mask.view(hidden_states.shape[0], -1)
    shape = (padding.shape[0], padding.shape[1] - past)
    return _prepare_4d_causal_attention_mask_for_sdpa(padding, shape, hidden_states, past), prepared[1]


@patch(
    _ATTENTION,
    "shardformer/layer/attn.py:182; kernel/extensions/pybind/flash_attention/flash_attention_sdpa_cuda.py:41",
    "flash-attn is not installed",
)
def attention_needs_no_mask(module: ModuleType, replacements: Replacements) -> None:
    """Without it a mask of [batch, 1, length, length] is made and is_causal not used, so that PyTorch cannot take its
    flash or cuDNN kernels; on a CPU AssertionError: No usable kernel found for FlashAttentionLoader.
    """
    if not _no_flash_attn():
        return

    def prepare_attn_kwargs(
        upstream: Callable,
        shape_4d: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        q_padding_mask: torch.Tensor | None = None,
        kv_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        invert: bool = True,
    ) -> dict[str, Any]:
        # the host waits for the mask here, once a forward and not in each layer
        padded = any(mask is not None and not mask.bool().all() for mask in (q_padding_mask, kv_padding_mask))
        if is_causal and not padded:
            # an empty mask means, as in Colossal-AI for long sequences, that the type is all there is
            empty = torch.empty(0, dtype=dtype, device=device)
            return {"attention_mask_type": module.AttnMaskType.CAUSAL, "attention_mask": empty}
        prepared = upstream(shape_4d, dtype, device, q_padding_mask, kv_padding_mask, is_causal, invert)
        if padded and not prepared["attention_mask"].numel():
            raise ValueError(
                f"padded sequences of {shape_4d[-1]} tokens need the flash-attn package; install it, or pack the "
                "sequences"
            )
        return prepared

    replacements.wrap(module, "ColoAttention.prepare_attn_kwargs", prepare_attn_kwargs)
    replacements.set(module.ColoAttention, "_dispatch_kernel", staticmethod(lambda dtype, mask_type, size: _sdpa))


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    scale: float | None = None,
    attention_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> torch.Tensor:
    # PyTorch refuses a mask beside is_causal, which its fast kernels need
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = None
    is_causal = is_causal and attention_mask is None
    return F.scaled_dot_product_attention(q, k, v, attention_mask, dropout_p, is_causal, scale=scale)


@patch(_ATTENTION, "282-320,496,535", f"{_RING}, and flash-attn is not installed or the group is compressed")
def rings_run_on_pytorch(module: ModuleType, replacements: Replacements) -> None:
    """Without it: RuntimeError: Flash Attention is not installed; where it is, keys and values go round in 16 bits."""
    no_flash_attn = _no_flash_attn()

    def attention(upstream: Callable, q: Any, k: Any, v: Any, sp_axis: int, *args: Any, **kwargs: Any) -> Any:
        if no_flash_attn or encoding_of(kwargs["pg_mesh"].get_group_along_axis(sp_axis)) is not None:
            from fp8booster.colossal.tensor.attention import attend_in_ring  # it imports the module that is patched

            upstream = attend_in_ring
        return upstream(q, k, v, sp_axis, *args, **kwargs)

    replacements.wrap(module, "RingAttention.attention", attention)
    if no_flash_attn:
        replacements.set(module, "_load_varlen_helpers", lambda: None)


@patch(
    _ATTENTION,
    "shardformer/layer/attn.py:1226, shardformer/layer/utils.py:417",
    f"{_RING} and a batch of sequences of different lengths",
)
def ring_attention_knows_padding(module: ModuleType, replacements: Replacements) -> None:
    """Without it the tokens of shorter sequences are rotated as if they stood where those of the longest do, and
    padding is trained to predict token 0.
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
            # upstream fills with 0, which is a token; -100 is no target of the loss
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
    _ATTENTION, "shardformer/modeling/llama.py:323,326, shardformer/modeling/gpt2.py:410,412", f"{_RING} and no labels"
)
def rings_need_no_labels(module: ModuleType, replacements: Replacements) -> None:
    """Without it TypeError: 'NoneType' object is not iterable."""

    @by_name
    def prepare_varlen_batch(call: Callable[[], Any], given: dict[str, Any]) -> Any:
        labels = given.get("inputs_embeds")
        return (labels, {}, None) if given.get("is_label") and not isinstance(labels, torch.Tensor) else call()

    def split_batch_zigzag(upstream: Callable, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return upstream(batch, *args, **kwargs) if isinstance(batch, (torch.Tensor, list)) else batch

    replacements.wrap(module, "RingAttention.prepare_varlen_batch", prepare_varlen_batch)
    replacements.wrap(inspect.getmodule(module.split_varlen_zigzag), "split_batch_zigzag", split_batch_zigzag)


@refuse(
    "shardformer.shard.shardformer:ShardFormer.optimize",
    "shardformer/modeling/qwen2.py:500",
    f"{_RING} with another model than LLaMA or GPT-2",
)
def ring_attention_is_refused_where_there_is_none(given: dict[str, Any]) -> str | None:
    """Without it the first forward raises AssertionError: Invalid sp_mode, or an error about sizes that do not fit."""
    kind = getattr(getattr(given["model"], "config", None), "model_type", None)
    if given["self"].shard_config.sequence_parallelism_mode != "ring_attn" or kind in ("llama", "gpt2"):
        return None
    return (
        f"{type(given['model']).__name__} has no ring attention: it is there for LLaMA and GPT-2; use "
        "sequence_parallelism_mode='split_gather' or 'all_to_all'"
    )


@patch("shardformer.modeling.gpt2", "414-425", "GPT-2 and no labels")
def gpt2_needs_no_labels(module: ModuleType, replacements: Replacements) -> None:
    """Without it UnboundLocalError: cannot access local variable 'loss', in every mode."""
    # upstream asks only whether labels are None, and makes no name for the loss then
    none = object()

    @by_name
    def forward(call: Callable[[], Any], given: dict[str, Any]) -> Any:
        if given.get("labels") is None:
            given["labels"] = none
        return call()

    def loss(upstream: Callable, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None if labels is none else upstream(labels, *args, **kwargs)

    replacements.wrap(module, "GPT2PipelineForwards.gpt2_lmhead_model_forward", forward)
    replacements.wrap(module, "dist_cross_entropy", loss)


def _with_a_mask(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it: AttributeError: 'NoneType' object has no attribute 'bool', 'size' or 'device', and in a pipeline the
    stages before wait for ever.
    """
    given = arguments_of(upstream, args, kwargs)
    config = given.arguments.get("shard_config")
    in_ring = config is not None and config.sequence_parallelism_mode == "ring_attn"
    if given.arguments.get("attention_mask") is None and (in_ring or "llama" not in upstream.__name__):
        # a batch or, in later stages of a pipeline, this rank's part of hidden states
        for name, parts in (("input_ids", 1), ("inputs_embeds", 1), ("hidden_states", config.sequence_parallel_size)):
            found = given.arguments.get(name)
            if found is not None:
                batch, tokens = found.shape[:2]
                mask = torch.ones(batch, tokens * parts, dtype=torch.bool, device=found.device)
                given.arguments["attention_mask"] = mask
                break
        else:
            raise ValueError("a model needs input_ids or inputs_embeds; give one of them")
    return upstream(*given.args, **given.kwargs)


for _name, _where, _lines, _needed_when in (
    (
        "llama_rings_need_no_mask",
        "llama:LlamaPipelineForwards.llama_for_causal_lm_forward",
        "322",
        f"{_RING} and no attention_mask",
    ),
    (
        "gpt2_needs_no_mask",
        "gpt2:GPT2PipelineForwards.gpt2_model_forward GPT2PipelineForwards.gpt2_lmhead_model_forward",
        "46,231,249,408",
        "no attention_mask",
    ),
    (
        "opt_needs_no_mask_in_a_pipeline",
        "opt:OPTPipelineForwards.opt_model_forward",
        "133,142",
        "OPT in a pipeline and no attention_mask",
    ),
):
    wrap(f"shardformer.modeling.{_where}", _lines, _needed_when, name=_name)(_with_a_mask)

"""Patches of attention in sharded models: causality and kernels."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements


def no_flash_attn(module: ModuleType) -> bool:
    """Whether the package is missing, whose kernels Colossal-AI would take."""
    return importlib.util.find_spec("flash_attn") is None


def _with_flash_attention(upstream: Callable, shard_config: Any, sp_mode: str | None = None, *args: Any) -> Any:
    """Attention under sequence parallelism is causal: it runs as with enable_flash_attention.

    Without it, and with transformers' "sdpa" attention, whose mask is None where is_causal would do, every token
    attends to those that follow.
    """
    if sp_mode is not None:
        shard_config.enable_flash_attention = True
    return upstream(shard_config, sp_mode, *args)


for _model, _lines, _along in (("llama", "143,576", "sequence"), ("qwen2", "154,574", "sequence and pipeline")):
    wrap(
        f"shardformer.modeling.{_model}:get_{_model}_flash_attention_forward",
        _lines,
        needed_when=f"{_along} parallelism with enable_flash_attention=False",
        name=f"{_model}_is_causal_along_a_sequence",
    )(_with_flash_attention)


@wrap(
    "shardformer.modeling.gpt2:_get_attention_mask",
    "87-106",
    needed_when='transformers\' "sdpa" attention, its default, and enable_flash_attention=False',
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
    """GPT-2's attention in a sharded model is causal.

    Without it transformers' "sdpa" attention is given a mask of the padding alone, and takes no causal one beside it:
    every token attends to those that follow, under tensor parallelism too.
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
    "shardformer.layer.attn",
    "shardformer/layer/attn.py:182; kernel/extensions/pybind/flash_attention/flash_attention_sdpa_cuda.py:41",
    needed_when="flash-attn is not installed",
)
def attention_needs_no_mask(module: ModuleType, replacements: Replacements) -> None:
    """Causal attention without padding runs through PyTorch's is_causal, on the CPU too.

    Without it a mask of [batch, 1, length, length] is made and is_causal not used, so that PyTorch cannot take its
    flash or cuDNN kernels; on a CPU no kernel is found (AssertionError: No usable kernel found for
    FlashAttentionLoader).
    """
    if not no_flash_attn(module):
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
        padded = any(mask is not None and not mask.bool().all() for mask in (q_padding_mask, kv_padding_mask))
        if is_causal and not padded:
            # an empty mask says, as in Colossal-AI for long sequences, that the type is all there is
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
    """PyTorch's attention; what is empty is no mask."""
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = None
    is_causal = is_causal and attention_mask is None
    return F.scaled_dot_product_attention(q, k, v, attention_mask, dropout_p, is_causal, scale=scale)

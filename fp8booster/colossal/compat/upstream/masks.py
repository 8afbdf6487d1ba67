"""Patches of forwards that cannot do without a mask, where none says that no token is padding, or without labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements


@wrap(
    "shardformer.modeling.llama:LlamaPipelineForwards.llama_model_forward "
    "LlamaPipelineForwards.llama_for_causal_lm_forward",
    "131,153,322",
    needed_when='sequence_parallelism_mode="ring_attn" and no attention_mask',
)
def llama_rings_need_no_mask(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """LLaMA's ring attention takes a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'bool'. No longer needed when
    `LlamaPipelineForwards` runs under ring_attn without attention_mask, with a pipeline and without.
    """
    return _with_a_mask(upstream, is_a_ring, args, kwargs)


@wrap(
    "shardformer.modeling.gpt2:GPT2PipelineForwards.gpt2_model_forward GPT2PipelineForwards.gpt2_lmhead_model_forward",
    "46,231,249,408",
    needed_when="no attention_mask",
)
def gpt2_needs_no_mask(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """A sharded GPT-2 takes a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'size', in every mode. No longer needed when
    `GPT2PipelineForwards` runs without attention_mask, under ring_attn too, with a pipeline and without.
    """
    return _with_a_mask(upstream, lambda config: True, args, kwargs)


@wrap(
    "shardformer.modeling.opt:OPTPipelineForwards.opt_model_forward",
    "133,142",
    needed_when="OPT in a pipeline and no attention_mask",
)
def opt_needs_no_mask_in_a_pipeline(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Later stages of an OPT take a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'device', and the stages before wait for ever. No
    longer needed when `OPTPipelineForwards.opt_model_forward` runs as the last of two stages without attention_mask.
    """
    return _with_a_mask(upstream, lambda config: True, args, kwargs)


@patch("shardformer.modeling.gpt2", "414-425", needed_when="GPT-2 and no labels")
def gpt2_needs_no_labels(module: ModuleType, replacements: Replacements) -> None:
    """A sharded GPT-2 gives its logits without labels.

    Without it UnboundLocalError: cannot access local variable 'loss', in every mode. No longer needed when
    `GPT2PipelineForwards.gpt2_lmhead_model_forward` runs without labels.
    """
    none = object()

    def forward(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(upstream).bind(*args, **kwargs)
        if given.arguments.get("labels") is None:
            given.arguments["labels"] = none
        return upstream(*given.args, **given.kwargs)

    def loss(upstream: Callable, labels: Any, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        return None if labels is none else upstream(labels, *args, **kwargs)

    replacements.wrap(module, "GPT2PipelineForwards.gpt2_lmhead_model_forward", forward)
    replacements.wrap(module, "dist_cross_entropy", loss)


def is_a_ring(config: Any) -> bool:
    """Whether a ShardConfig, if there is one, asks for ring attention."""
    return config is not None and config.sequence_parallelism_mode == "ring_attn"


def mask_of_ones(inputs: dict[str, Any], config: Any) -> torch.Tensor:
    """For whole sequences, [batch, tokens], bool.

    Args:
        inputs: what a forward is given: a batch or, in later stages of a pipeline, this rank's part of hidden states.
        config: the ShardConfig.

    Raises:
        ValueError: none of these is there.
    """
    for name, parts in (("input_ids", 1), ("inputs_embeds", 1), ("hidden_states", config.sequence_parallel_size)):
        found = inputs.get(name)
        if found is not None:
            batch, tokens = found.shape[:2]
            return torch.ones(batch, tokens * parts, dtype=torch.bool, device=found.device)
    raise ValueError("a model needs input_ids or inputs_embeds; give one of them")


def _with_a_mask(upstream: Callable, is_needed: Callable[[Any], bool], args: tuple, kwargs: dict) -> Any:
    """What a forward gives that gets a mask of ones where it has none and a ShardConfig needs one."""
    given = inspect.signature(upstream).bind(*args, **kwargs)
    config = given.arguments.get("shard_config")
    if given.arguments.get("attention_mask") is None and is_needed(config):
        given.arguments["attention_mask"] = mask_of_ones(given.arguments, config)
    return upstream(*given.args, **given.kwargs)

"""Patches of forwards that cannot do without a mask, where none says that no token is padding, or without labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements


@patch("shardformer.modeling.gpt2", "414-425", needed_when="GPT-2 and no labels")
def gpt2_needs_no_labels(module: ModuleType, replacements: Replacements) -> None:
    """A sharded GPT-2 gives its logits without labels.

    Without it UnboundLocalError: cannot access local variable 'loss', in every mode.
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


def _with_a_mask(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """A sharded model takes a batch without a mask for one without padding.

    Without it: AttributeError: 'NoneType' object has no attribute 'bool', 'size' or 'device', and in a pipeline the
    stages before wait for ever.
    """
    given = inspect.signature(upstream).bind(*args, **kwargs)
    config = given.arguments.get("shard_config")
    is_needed = "llama" not in upstream.__name__ or is_a_ring(config)
    if given.arguments.get("attention_mask") is None and is_needed:
        given.arguments["attention_mask"] = mask_of_ones(given.arguments, config)
    return upstream(*given.args, **given.kwargs)


for _name, _where, _lines, _needed_when in (
    (
        "llama_rings_need_no_mask",
        "llama:LlamaPipelineForwards.llama_for_causal_lm_forward",
        "322",
        'sequence_parallelism_mode="ring_attn" and no attention_mask',
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
    wrap(f"shardformer.modeling.{_where}", _lines, needed_when=_needed_when, name=_name)(_with_a_mask)

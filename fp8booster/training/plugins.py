"""Plugins for a `Parallel`: the arguments of their constructors, ours or Colossal-AI's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from .parallel import Parallel, suggestion

if TYPE_CHECKING:
    from colossalai.booster.plugin.plugin_base import Plugin

FP32_WEIGHTS = ("ddp", "fsdp")
"""Plugins that train the weights as they are given; the others keep FP32 masters of 16-bit ones."""

PIPELINE_STYLES = ("1f1b", "interleaved", "zbv")
"""The schedules of Colossal-AI's pipelines; zbv is zero-bubble."""


def make_plugin(
    plugin_class: type[Plugin], parallel: Parallel, network: nn.Module, max_norm: float, options: dict[str, Any]
) -> Plugin:
    """Return a plugin for BF16 that boosts `network`; torch.distributed must run, for it may make process groups.

    Raises ValueError for a model, a vocabulary or a pipeline schedule that does not go with the sizes.

    Args:
        plugin_class: of `parallel.plugin`, ours or Colossal-AI's.
        network: from transformers.
        max_norm: gradients are clipped to this norm; 0: not clipped.
        options: further arguments, which win.
    """
    arguments = with_chunks(_arguments(parallel, network, max_norm) | options, parallel)
    if arguments.get("pp_style") == "zbv" and "scheduler_nodes" not in arguments:  # Colossal-AI leaves it to its user
        from fp8booster.colossal.pipeline import zero_bubble_schedule

        arguments["scheduler_nodes"] = zero_bubble_schedule(parallel.pp, parallel.micro_batches)
    _require_layers(network, parallel.pp * arguments.get("num_model_chunks", 1))
    return plugin_class(**arguments)


def _arguments(parallel: Parallel, network: nn.Module, max_norm: float) -> dict[str, Any]:
    clipped = {"precision": "bf16", "max_norm": max_norm or math.inf}
    match parallel.plugin:
        case "low_level_zero":
            return {"precision": "bf16", "max_norm": max_norm, "stage": parallel.zero_stage}
        case "gemini":
            accumulates = parallel.micro_batches > 1
            sizes: dict[str, Any] = {"tp_size": parallel.tp, "enable_gradient_accumulation": accumulates}
            return {**clipped, **sizes, "placement_policy": "static"}
        case "hybrid" | "moe":
            sizes = {"tp_size": parallel.tp, "pp_size": parallel.pp, "zero_stage": parallel.zero_stage}
            if parallel.plugin == "moe":
                sizes["ep_size"] = parallel.ep
            if parallel.pp > 1:
                sizes["num_microbatches"] = parallel.micro_batches
            return {**clipped, **sizes, **_vocabulary(parallel.tp, network), **_sequence_parallelism(parallel)}
        case "fsdp":
            return {
                # FSDP knows no `precision`, and keeps FP32 weights to gather in BF16
                "mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16),
                "auto_wrap_policy": ModuleWrapPolicy(_blocks(network)),
            }
    return {}


def _vocabulary(tp: int, network: nn.Module) -> dict[str, Any]:
    config: Any = network.config
    size = config.vocab_size
    if size % tp:
        raise ValueError(
            f"The model has {size} embeddings, which --tp {tp} cannot divide; give another --tp, or save the model "
            "with more of them (resize_token_embeddings)"
        )
    # Without it Colossal-AI pads each shard to a multiple of 64, and then saves no optimizer
    # (checkpoint_io/utils.py:128).
    return {"make_vocab_size_divisible_by": math.gcd(64, size // tp)}


def _sequence_parallelism(parallel: Parallel) -> dict[str, Any]:
    if parallel.sp_mode is None:
        return {}
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": parallel.sp_mode, "sp_size": parallel.sp}


def _blocks(network: nn.Module) -> set[type[nn.Module]]:
    """Return the classes of a model's repeated blocks, each of which FSDP gathers by itself."""
    names = getattr(network, "_no_split_modules", None) or ()
    blocks = {type(module) for module in network.modules() if type(module).__name__ in names}
    if not blocks:
        raise ValueError(
            f"{type(network).__name__} does not say which blocks it repeats (_no_split_modules), and FSDP gathers "
            "block by block; use another --plugin"
        )
    return blocks


def with_chunks(arguments: dict[str, Any], parallel: Parallel) -> dict[str, Any]:
    """Return a plugin's arguments with `num_model_chunks`, the pieces of the model on a stage of some schedules.

    Raises ValueError for a schedule that does not exist, and for sizes that it does not take.
    """
    style = arguments.get("pp_style", "1f1b")
    if style not in PIPELINE_STYLES:
        raise ValueError(f"pp_style is {style!r}; {suggestion(str(style), PIPELINE_STYLES)}")
    if style == "1f1b":
        return arguments
    if parallel.pp < 2:
        raise ValueError(f"pp_style={style} is a pipeline's; give --pp, the number of its stages")
    if parallel.micro_batches % parallel.pp:
        raise ValueError(
            f"--micro-batches is {parallel.micro_batches}; with pp_style={style} it must be a multiple of --pp, which "
            f"is {parallel.pp}"
        )
    chunks = arguments.get("num_model_chunks", 2)
    if chunks != 2 and (style == "zbv" or not isinstance(chunks, int) or chunks < 2):
        more = "" if style == "zbv" else " or more"
        raise ValueError(f"num_model_chunks is {chunks!r}; with pp_style={style} it must be 2{more}")
    return {"num_model_chunks": chunks} | arguments


def _require_layers(network: nn.Module, pieces: int) -> None:
    """Raise ValueError for a model that a pipeline cannot be cut from; its ranks would wait for each other."""
    layers = getattr(getattr(network, "config", None), "num_hidden_layers", None)
    if layers is not None and layers < pieces:
        raise ValueError(
            f"The model has {layers} layers and the pipeline {pieces} pieces (--pp times its chunks); give a smaller "
            "--pp"
        )

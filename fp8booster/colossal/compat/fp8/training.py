"""The optimizer that Gemini steps FP8 masters with, and the loss that reads hidden states."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.optim.one_pass import OURS


@patch("zero.gemini.gemini_optimizer", "43", needed_when="Gemini trains with an optimizer that needs no compiler")
def gemini_takes_an_uncompiled_optimizer(module: ModuleType, replacements: Replacements) -> None:
    """Gemini accepts the optimizers of `fp8booster.optim`, which find the amaxes of weights, beside FusedAdam and such.

    Without it: AssertionError: You should use an optimizer in the available list, all of which need a compiler for the
    machine's GPU and processor. No longer needed when one of them runs without, and finds amaxes.
    """
    replacements.set(module, "_AVAIL_OPTIM_LIST", {*module._AVAIL_OPTIM_LIST, *OURS})


@wrap("shardformer.layer.loss:dist_cross_entropy", "145", needed_when="the loss of a sharded model is fused")
def losses_are_computed_from_hidden_states(
    upstream: Callable, labels: torch.Tensor, logits: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The loss of shardformer's forwards takes hidden states for logits, and computes it over chunks of logits.

    Without it: TypeError, since what `colossal/tensor/loss.py` gives for logits is no tensor. No longer needed when
    shardformer's forwards can be given their loss.
    """
    loss_of = getattr(logits, "loss_of", None)
    return upstream(labels, logits, *args, **kwargs) if loss_of is None else loss_of(labels)

"""Decoder layers with their pointwise parts fused around the products, and the loss over chunks of logits."""

from __future__ import annotations

from collections import Counter

from torch import nn

from fp8booster.nn.fused.causal_lm_loss import fused_head, use_fused_loss, use_native_loss, why_not_fused
from fp8booster.nn.fused.decoder import FusedDecoderLayer, ReplacedAttention, fuse_blocks, unfused_parts
from fp8booster.nn.fused.families import FAMILIES
from fp8booster.nn.fused.loss import linear_cross_entropy
from fp8booster.nn.fused.merged_layers import merged_linears
from fp8booster.nn.fused.part import Fused
from fp8booster.nn.linear.layer import require_own_weights
from fp8booster.nn.modules import require_module

__all__ = [
    "fuse_blocks",
    "fuse_model",
    "fused_summary",
    "leave_unfused",
    "linear_cross_entropy",
    "use_fused_loss",
    "use_native_loss",
    "why_not_fused",
]


def fuse_model(model: nn.Module, replaced_attention: ReplacedAttention | None = None) -> str:
    """Fuse as `nn.fuse` does, without CUDA graphs.

    Args:
        model: any module, or what an engine has made of it.
        replaced_attention: gives the mixin for an attention whose forward an engine replaced, or why there is none.

    Returns:
        What was fused and what was not, in a line.
    """
    require_module(model)
    require_own_weights(model)
    fuse_blocks(model, replaced_attention)
    use_fused_loss(model)
    return fused_summary(model)


def leave_unfused(model: nn.Module) -> None:
    """Let a model whose configuration has `fused=False` compute the loss as it was, where it was to be fused.

    Raises:
        ValueError: parts of decoder layers are fused: that is not undone, since their weights lie together by now.
    """
    if any(isinstance(module, (Fused, FusedDecoderLayer)) for module in model.modules()):
        raise ValueError(
            "the configuration has fused=False, and decoder layers of the model were fused before, which is not "
            "undone; leave fused=False out, or make the model anew"
        )
    use_native_loss(model)


def fused_summary(model: nn.Module) -> str:
    """Say in a line what of a model is fused as it is now, and what is not."""
    layers = sum(isinstance(module, FusedDecoderLayer) for module in model.modules())
    apart = Counter(merged.why_not_merged for merged in merged_linears(model) if merged.why_not_merged is not None)
    left = "; ".join(
        [f"{count} not: {part}" for part, count in unfused_parts(model).items()]
        + [f"{count} groups of layers not merged: {reason}" for reason, count in apart.items()]
    )
    if layers == 0 and not left:
        return f"nothing is fused, as there are no decoder layers of {', '.join(FAMILIES.values())}"
    reason = why_not_fused(model)
    if reason is None and fused_head(model) is None:
        reason = "use_fused_loss changes that"
    loss = "loss over chunks of logits" if reason is None else f"loss as it was ({reason})"
    return f"{layers} decoder layers fused{f' ({left})' if left else ''}, {loss}"

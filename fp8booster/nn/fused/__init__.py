"""Decoder layers with their pointwise parts fused around the FP8 products, and the loss over chunks of logits."""

from __future__ import annotations

from torch import nn

from fp8booster.nn.fused.causal_lm_loss import use_fused_loss, use_native_loss, why_not_fused
from fp8booster.nn.fused.decoder import (
    FAMILIES,
    AttentionOf,
    FusedDecoderLayer,
    fuse_blocks,
    no_replaced_attention,
    parts_unfused,
)
from fp8booster.nn.fused.loss import linear_cross_entropy

__all__ = [
    "fuse",
    "fuse_blocks",
    "fused_summary",
    "linear_cross_entropy",
    "use_fused_loss",
    "use_native_loss",
    "why_not_fused",
]


def fuse(model: nn.Module, attention_of: AttentionOf = no_replaced_attention) -> str:
    """Fuse what can be fused of a model whose linear layers were converted to FP8, in place.

    Args:
        model: any module.
        attention_of: as in `fuse_blocks`.

    Returns:
        What was fused and what was not, in a line.
    """
    fuse_blocks(model, attention_of)
    use_fused_loss(model)
    return fused_summary(model)


def fused_summary(model: nn.Module) -> str:
    """What of a model is fused as it is now, and what is not, in a line."""
    layers = sum(isinstance(module, FusedDecoderLayer) for module in model.modules())
    left = "; ".join(f"{count} not: {part}" for part, count in parts_unfused(model).items())
    if layers == 0 and not left:
        return f"nothing is fused, as there are no decoder layers of {', '.join(FAMILIES)}"
    reason = why_not_fused(model)
    loss = "loss over chunks of logits" if reason is None else f"loss as it was ({reason})"
    return f"{layers} decoder layers fused{f' ({left})' if left else ''}, {loss}"

"""Decoder layers with their pointwise parts fused around the FP8 products, and the loss over chunks of logits."""

from __future__ import annotations

from torch import nn

from fp8booster.nn.fused.causal_lm_loss import use_fused_loss, use_native_loss, why_not_fused
from fp8booster.nn.fused.decoder import fuse_blocks
from fp8booster.nn.fused.loss import linear_cross_entropy

__all__ = [
    "fuse",
    "fuse_blocks",
    "linear_cross_entropy",
    "use_fused_loss",
    "use_native_loss",
    "why_not_fused",
]


def fuse(model: nn.Module) -> str:
    """Fuse what can be fused of a model whose linear layers were converted to FP8, in place.

    Raises:
        ValueError: the model has no layer that can be.

    Returns:
        What was fused and what was not, in a line.
    """
    layers = fuse_blocks(model)
    if layers == 0:
        raise ValueError(
            "FP8Config(fused=True) knows the decoder layers of transformers' LLaMA, Mistral and Qwen2, and the model "
            "has none of them; leave it out"
        )
    reason = why_not_fused(model)
    use_fused_loss(model)
    loss = "loss over chunks of logits" if reason is None else f"loss as it was ({reason})"
    return f"{layers} decoder layers fused, {loss}"

"""Decoder layers with their pointwise parts fused around the FP8 products, and the loss over chunks of logits."""

from __future__ import annotations

from torch import nn

from fp8booster.nn.fused.causal_lm_loss import use_fused_loss
from fp8booster.nn.fused.decoder import fuse_blocks
from fp8booster.nn.fused.loss import linear_cross_entropy

__all__ = ["fuse", "fuse_blocks", "linear_cross_entropy", "use_fused_loss"]


def fuse(model: nn.Module) -> int:
    """Fuse what can be fused of a model whose linear layers were converted to FP8, in place.

    Raises:
        ValueError: nothing can be.

    Returns:
        The number of decoder layers fused.
    """
    layers = fuse_blocks(model)
    if layers == 0:
        raise ValueError(
            "FP8Config(fused=True) knows the decoder layers of transformers' LLaMA, Mistral and Qwen2, and the model "
            "has none of them; leave it out"
        )
    use_fused_loss(model)
    return layers

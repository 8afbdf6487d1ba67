"""Layers of a model that an engine reshards, which keep no FP8 weight between forward and backward."""

from __future__ import annotations

from torch import nn

from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.resharded import ReshardedWeight


def follow_resharding(model: nn.Module) -> None:
    """Let the FP8 layers and experts of a model keep no FP8 weight between forward and backward.

    For a model whose weights are gathered for forward, freed after it and gathered again for backward, into the same
    tensor: call it after `fully_shard` of FSDP2. `compress_flat_fsdp` does it for the wrapped modules of FSDP1.

    Args:
        model: converted to FP8 layers.
    """
    for module in model.modules():
        if isinstance(module, FP8Layer):
            module.fp8_weight = ReshardedWeight(module.weight_is_transposed)
        elif isinstance(module, FP8Experts):
            module.follow_resharding()
    for merged in merged_layers(model):
        merged.fp8_weight = ReshardedWeight()

"""Models whose layers keep no FP8 weight, before anything shards them."""

from torch import nn

from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.weights.holder import weight_holders
from fp8booster.nn.weights.resharded import ReshardedWeight


def follow_resharding(model: nn.Module) -> None:
    """Let a model's FP8 layers and experts keep no FP8 weight between forward and backward."""
    for module in model.modules():
        for holder in weight_holders(module).values():
            holder.fp8_weight = ReshardedWeight(holder.weight_is_transposed)
    for merged in merged_layers(model):
        merged.fp8_weight = ReshardedWeight()

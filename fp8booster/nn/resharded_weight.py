"""The FP8 weight of a layer whose weight is whole only while the layer runs, as under FSDP.

Between forward and backward the weight is a shard again. Were its FP8 transpose kept for backward, as a layer does
elsewhere, the whole model would lie on every rank. So forward keeps nothing of it, and backward takes the transpose
from the weight that was gathered again: the copy that was gathered in FP8, or a cast made there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn.functional import LateWeight, quantize_weight
from fp8booster.nn.fused.merged import merged_layers
from fp8booster.nn.fused.rows import one_below_the_other
from fp8booster.nn.layer import FP8Layer
from fp8booster.nn.weight_cache import WeightCache
from fp8booster.tensor import QuantizedMatrix


class ReshardedWeight(WeightCache):
    """In the place of a layer's `WeightCache`: holds a copy only while an engine that gathers in FP8 lends one."""

    gathered: QuantizedMatrix | None
    """The weight as it was gathered in FP8, with its transpose, until it is a shard again."""

    def is_kept_by_engine(self, weight: torch.Tensor) -> bool:
        """True: whatever the mode, `get` is asked."""
        return True

    def get(
        self, weight: torch.Tensor, config: FP8Config, *, transposed: bool, is_transposed: bool = False
    ) -> QuantizedMatrix:
        """The FP8 weight that was gathered, or one cast now, without its transpose."""
        if self.gathered is not None:
            return self.gathered
        return quantize_weight(weight.t() if is_transposed else weight, config, transposed=False)

    def in_backward(self, weight: torch.Tensor, config: FP8Config) -> LateWeight:
        """The transpose of the weight as it is when backward asks; `weight` is what forward multiplied by, [N, K]."""
        weight = (
            weight.detach()
        )  # its memory is freed and filled again, and the tensor still says where it lies

        def late_weight() -> tuple[torch.Tensor, torch.Tensor]:
            w = self.gathered
            if w is None:
                w = quantize_weight(weight, config, plain=False, transposed=True)
            return w.transpose, w.scale_of_transpose()

        return late_weight

    def clear(self) -> None:
        """Forget the copy."""
        super().clear()
        self.gathered = None


class ReshardedMergedWeight:
    """`MergedLayers.lent` of layers whose weights are whole only while they run: a `ReshardedWeight` of all of them."""

    gathered: QuantizedMatrix | None = None
    """The weights one below the other as they were gathered in FP8, with the transpose, until they are shards again."""

    def get(self, weights: Sequence[torch.Tensor], config: FP8Config) -> QuantizedMatrix:
        """The FP8 weight that was gathered, or one cast now, without its transpose."""
        if self.gathered is not None:
            return self.gathered
        return quantize_weight(one_below_the_other(weights), config, transposed=False)

    def in_backward(self, weights: Sequence[torch.Tensor], config: FP8Config) -> LateWeight:
        """The transpose of the weights as they are when backward asks."""
        weights = [weight.detach() for weight in weights]

        def late_weight() -> tuple[torch.Tensor, torch.Tensor]:
            w = self.gathered
            if w is None:
                whole = one_below_the_other(weights)
                w = quantize_weight(whole, config, plain=False, transposed=True)
            return w.transpose, w.scale_of_transpose()

        return late_weight

    def __deepcopy__(self, memo: dict) -> ReshardedMergedWeight:
        return ReshardedMergedWeight()

    def __reduce__(self) -> tuple:
        return ReshardedMergedWeight, ()


def follow_resharding(model: nn.Module) -> None:
    """Let the FP8 layers of a model keep no FP8 weight between forward and backward.

    For a model whose weights are gathered for forward, freed after it and gathered again for backward, into the same
    tensor: call it after `fully_shard` of FSDP2. `compress_flat_fsdp` does it for the wrapped modules of FSDP1.

    Args:
        model: converted to FP8 layers.
    """
    for module in model.modules():
        if isinstance(module, FP8Layer):
            module.fp8_weight = ReshardedWeight()
    for merged in merged_layers(model):
        merged.lent = ReshardedMergedWeight()

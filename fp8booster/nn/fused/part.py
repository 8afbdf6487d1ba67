"""Mixins of modules of transformers' that are fused, and of parts whose linear layers of one input are one product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8booster.config import FP8Config
from fp8booster.nn.fused.families import Part
from fp8booster.nn.fused.merged_layers import Merged
from fp8booster.nn.linear.layer import FP8Layer, config_around
from fp8booster.nn.linear.low_rank import low_rank_of, low_rank_product
from fp8booster.nn.modules import may_be_bypassed


class Fused(nn.Module):
    """Mixin of a module of transformers' whose class was tried out."""

    name_prefix = "Fused"

    tried: ClassVar[tuple[type[nn.Module], Callable]]  # the class that the module was, and its forward then

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"tried": (original, original.forward)}

    @property
    def why_replaced(self) -> str | None:
        """The reason why it runs as its class does now; None: that is as it was tried."""
        original, forward = self.tried
        # someone may replace the forward of that class for all its modules
        return None if original.forward is forward else "the forward of its class was replaced"


class FusedPart(Fused):
    """Mixin of a part with linear layers of one input."""

    part: Part
    fp8_merged: Merged | None
    """None where there is one layer, whose product is that of all, and where they run one by one."""

    def merged_product(self, input: Tensor) -> Tensor | None:
        """Return what the merged layers make of an input; None: call the layers, which the part has now, one by one."""
        layers: list[Any] = list(map(self._modules.get, self.part.merged))
        merged = self.fp8_merged
        if merged is None:
            if not self.training or torch.compiler.is_compiling():
                return None
            return own_product(layers[0], input)
        if merged.stands_for(*layers):
            return merged(input)
        return low_rank_product(input, layers) if self.training else None

    @property
    def fused_config(self) -> FP8Config | None:
        """The configuration of what is fused behind the product; None: the product is not in FP8."""
        if self.fp8_merged is None:
            return config_around([getattr(self, self.part.merged[0])])
        return self.fp8_merged.fused_config

    @property
    def is_fused(self) -> bool:
        """Tell whether its layers of one input are one product, as far as it is known."""
        merged = self.fp8_merged
        if merged is None or merged.why_not_merged is None:
            return True
        return all(low_rank_of(getattr(self, name)) for name in self.part.merged)


def own_product(layer: nn.Module, input: Tensor) -> Tensor:
    """Return what a linear layer makes of an input, to be written over: a copy where a hook or adapter has it too."""
    product = layer(input)
    is_own = isinstance(layer, (nn.Linear, FP8Layer)) and may_be_bypassed(layer)
    return product if is_own else product.clone()

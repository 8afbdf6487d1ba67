"""Mixins of modules of transformers' that are fused: of parts whose layers of one input are one product, and MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8booster.config import FP8Config
from fp8booster.nn.fused.activations import activation_kind, fused_kind
from fp8booster.nn.fused.families import Part
from fp8booster.nn.fused.merged_layers import Merged
from fp8booster.nn.fused.pointwise import Saving, activate
from fp8booster.nn.linear.layer import FP8Layer, config_around
from fp8booster.nn.linear.low_rank import low_rank_of, low_rank_product
from fp8booster.nn.modules import may_be_bypassed, run_with


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
    # who kept the tensor, as a hook may, must not see it rotated
    return product if is_own else product.clone()


class FusedMLP(FusedPart):
    """Mixin of a feed-forward block as transformers wrote it, with a kernel for its activation."""

    activation: str  # its name in the block

    @property
    def kind(self) -> str | None:
        """The kernel's name of the activation as it is now; None: the activation runs itself."""
        return fused_kind(self._modules[self.activation])

    @property
    def why_not_now(self) -> str | None:
        """The reason why it is not fused as it is now; None: it is."""
        activation = getattr(self, self.activation)
        if self.why_replaced is None and activation_kind(activation) is None:
            return f"its activation is {type(activation).__name__} now"
        return self.why_replaced or (None if self.kind else "its activation has hooks or a forward of its own")

    def forward(self, x: Tensor) -> Tensor:
        kind = None if torch.compiler.is_compiling() or not self.training else self.kind
        if kind is None:
            return super().forward(x)
        fused = partial(activate, kind=kind, saving=Saving.of_activation(self.fused_config))
        return run_with(FusedMLP._as_written, self, {self.activation: fused}, x)

    def _as_written(self, *args: Any) -> Tensor:
        return super().forward(*args)


class FusedGatedMLP(FusedMLP):
    """Mixin of a gated feed-forward block, or of an expert that is one."""

    def forward(self, x: Tensor) -> Tensor:
        """As transformers', with one product for gate and up."""
        if self.why_replaced is not None:
            return super(FusedMLP, self).forward(x)
        output: Any = self._modules[self.part.output]
        gate_up = self.merged_product(x)
        if gate_up is not None and (kind := self.kind) is not None:
            return output(activate(gate_up, kind, gated=True, saving=Saving.of_activation(self.fused_config)))
        if gate_up is not None:
            gate, up = gate_up.unsafe_chunk(2, -1)  # an activation may write over its input
            return output(getattr(self, self.activation)(gate) * up)
        if self.fp8_merged is None:
            return super(FusedMLP, self).forward(x)
        # up first: then backward gives gradients in the order of the one product, which a rank may run whose expert has
        # other tokens; ZeRO adds up gradients of ranks in the order in which they come
        gate, up = (getattr(self, name) for name in self.part.merged)
        of_up = up(x)
        return output(getattr(self, self.activation)(gate(x)) * of_up)

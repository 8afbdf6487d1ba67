"""Feed-forward blocks with a kernel for their activation, and one product for gate and up."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8booster.nn.fused.activations import activation_kind, fused_kind
from fp8booster.nn.fused.part import FusedPart
from fp8booster.nn.fused.pointwise import Saving, activate
from fp8booster.nn.modules import run_with


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

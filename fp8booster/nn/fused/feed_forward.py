"""Feed-forward blocks with a kernel for their activation, and one product for gate and up."""

from __future__ import annotations

from functools import partial

import torch

from fp8booster.nn.fused.part import FusedPart
from fp8booster.nn.fused.pointwise import Saving, activate, activate_gated
from fp8booster.nn.modules import may_be_bypassed, run_with


class FusedMLP(FusedPart):
    """Mixin of a feed-forward block as transformers wrote it, with a kernel for its activation."""

    activation: str
    """Its name in the block."""

    kind: str
    """What it computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() or not self.training or not may_be_bypassed(getattr(self, self.activation)):
            return super().forward(x)
        fused = partial(activate, kind=self.kind, saving=Saving.of_activation(self.fused_config))
        return run_with(super().forward, self, {self.activation: fused}, x)


class FusedGatedMLP(FusedMLP):
    """Mixin of a gated feed-forward block, or of an expert that is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As transformers', with one product for gate and up."""
        output = getattr(self, self.part.output)
        gate_up = self.merged_product(x)
        if gate_up is not None and not may_be_bypassed(activation := getattr(self, self.activation)):
            gate, up = gate_up.chunk(2, -1)
            return output(activation(gate) * up)
        if gate_up is not None:
            return output(activate_gated(gate_up, self.kind, saving=Saving.of_activation(self.fused_config)))
        if self.fp8_merged is None:
            return super(FusedMLP, self).forward(x)
        # up first: then backward gives gradients in the order of the one product, which a rank may run whose expert has
        # other tokens; ZeRO adds up gradients of ranks in the order in which they come
        gate, up = (getattr(self, name) for name in self.part.merged)
        of_up = up(x)
        return output(getattr(self, self.activation)(gate(x)) * of_up)

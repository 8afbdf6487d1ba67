"""Norms in one kernel: one that adds the residual before it, and those of heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fp8booster.kernels.operators import without_autocast
from fp8booster.nn.fused.part import Fused
from fp8booster.nn.fused.pointwise import PLAIN, Saving, row_norm
from fp8booster.nn.fused.trials import Norm, norm_of
from fp8booster.nn.modules import forward_of_class, may_be_bypassed, wait_for_parameters


class FusedNorm(Fused):
    """Mixin of a norm."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    computes: ClassVar[Norm]

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return super().members_before(original) | {"computes": norm_of(original)}

    @property
    def why_not_now(self) -> str | None:
        """The reason why it is not fused as it is now; None: it is."""
        taken_out = self.computes.weighted and self.weight is None
        return self.why_replaced or ("its weight was taken out" if taken_out else None)

    @property
    def takes_terms(self) -> bool:
        """Tell whether its forward is the one here, and not that of a class derived from its own afterwards."""
        ours = FusedNorm.forward
        return type(self).forward is ours or forward_of_class(self) is ours

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, *, both: bool = False, saving: Saving = PLAIN
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of `hidden_states + residual`; with `both`, that sum too. `saving`: how the sum is saved."""
        centered, unit_offset, epsilon, weighted, biased = self.computes
        # a norm without a weight is one of ones: one kernel serves both
        weight: Any = self.weight if weighted else hidden_states.new_ones(hidden_states.shape[-1])
        if weight is None or self.why_replaced is not None:
            h = hidden_states if residual is None else hidden_states + residual
            # the class's own forward knows no residual
            y = super().forward(h)
            return (y, h) if both else y
        if weight.dim() > 1 and weight.shape != hidden_states.shape[-weight.dim() :]:
            shape = list(hidden_states.shape)
            raise ValueError(f"a norm with weights {list(weight.shape)} was given {shape}; give it those heads")
        y, h = row_norm(
            hidden_states,
            weight,
            getattr(self, epsilon),
            residual,
            self.bias if biased else None,
            centered=centered,
            unit_offset=unit_offset,
            saving=saving,
        )
        return (y, h) if both else y


class HeadNorms:
    """Layer norms of heads, each of which is a module, as one.

    Args:
        norms: of one size and epsilon, without biases.
    """

    def __init__(self, norms: Sequence[nn.LayerNorm]) -> None:
        self.norms = norms

    @classmethod
    def of(cls, module: nn.Module) -> HeadNorms | None:
        """Return those that a module holds in a list, and nothing else; None: it does not."""
        inside = list(module.modules())
        norms = [each for each in inside if type(each) is nn.LayerNorm]
        if not norms or len(norms) != len(inside) - 2 or any(each.bias is not None for each in norms):
            return None
        alike = len({(each.normalized_shape, each.eps) for each in norms}) == 1
        return cls(norms) if alike and norms[0].weight is not None else None

    def __call__(self, heads: Tensor) -> Tensor:
        """Return the norms of heads, [..., H, D]."""
        if not all(map(may_be_bypassed, self.norms)):
            return torch.cat([norm(each) for norm, each in zip(self.norms, heads.split(1, -2), strict=True)], -2)
        for norm in self.norms:
            wait_for_parameters(norm)
        with without_autocast(heads.device.type):  # differentiable: each norm gets its row's gradient
            weight = torch.stack([norm.weight for norm in self.norms])
        return row_norm(heads, weight, self.norms[0].eps, centered=True)[0]

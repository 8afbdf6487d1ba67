"""Several nn.Linear layers that read one input, as one product in their own precision: q, k and v, or gate and up.

`merged_layers` does that for FP8 layers, whose FP8 weights are copies that can lie as one likes. Here the parameters
themselves are moved once, stacked by rows, so that no step copies them: each stays the parameter that it was, over
other memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.nn.fused.layers_of_one_input import LayersOfOneInput
from fp8booster.nn.modules import held_by_modules, must_be_called
from fp8booster.nn.weights.stacking import as_one, lie_together


class MergedLinears(LayersOfOneInput):
    """nn.Linear layers of one input whose products are computed as one where that is right.

    Args:
        layers: in the order of their outputs; their weights are laid stacked by rows where nothing else holds their
            memory.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        self._why_moved = _lay_together(self.weights)

    @property
    def why_not_merged(self) -> str | None:
        """Why the layers' products run one by one in training, as they are now; None where they run as one."""
        return self._why_never() or (None if lie_together(self.weights) else self._why_moved)

    def __call__(self, input: torch.Tensor) -> torch.Tensor | None:
        """All outputs side by side, [..., sum of output features], or None: call the layers one by one.

        They are, where `why_not_merged` has a reason; in evaluation; under autocast, which would cast them as one anew;
        and in compiled code, where the compiler sees the layers themselves.
        """
        first, weights = self.layers[0], self.weights
        if (
            torch.compiler.is_compiling()
            or not all(layer.training for layer in self.layers)
            or input.numel() == 0
            or input.dtype != first.weight.dtype
            or torch.is_autocast_enabled(input.device.type)
            or self._why_never() is not None
            or not lie_together(weights)
        ):
            return None
        bias = None if first.bias is None else torch.cat([layer.bias for layer in self.layers])
        return F.linear(input, _AsOne.apply(*weights), bias)

    def _why_never(self) -> str | None:
        if self._why_replaced is not None:
            return self._why_replaced
        first = self.layers[0]
        for layer in self.layers:
            if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
                return f"one is a {type(layer).__name__} with a weight of class {type(layer.weight).__name__}"
            if layer.weight.dtype != first.weight.dtype:
                return "the layers' dtypes differ"
            if (layer.bias is None) != (first.bias is None):
                return "only some of the layers have a bias"
            if must_be_called(layer):
                return "a layer has hooks or a forward of its own, which must run"
        return None


_MOVED = "their weights have moved since; fuse the model when it has its dtype and device, and no copy of it"


def _lay_together(weights: Sequence[torch.Tensor]) -> str:
    """Move weights stacked by rows; returns why they do not lie so, if ever they do not."""
    for weight in weights:
        if type(weight) is not nn.Parameter or weight.is_meta:
            return "their weights are not plain parameters"
        first = weights[0]
        if (weight.dtype, weight.device, weight.shape[1]) != (first.dtype, first.device, first.shape[1]):
            return "their weights do not fit together"
        # an engine may write to the memory that it saw, as ZeRO does when it gathers; it has hooks on the gradients
        if weight._post_accumulate_grad_hooks or weight.untyped_storage().nbytes() != weight.nbytes:
            return "others, such as an engine, hold the memory of their weights; fuse the model before it is boosted"
    with torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    return _MOVED


class _AsOne(torch.autograd.Function):
    """Weights that lie stacked by rows as one matrix, which shares their memory."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(weight) for weight in weights]
        return as_one(weights)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        return gradient.split(ctx.rows)


def merged_linears(model: nn.Module) -> list[MergedLinears]:
    """Those that the modules of a model hold as attributes."""
    return held_by_modules(model, MergedLinears)

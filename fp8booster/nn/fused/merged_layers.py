"""Several linear layers that read one input, as one product: q, k and v, or gate and up.

The layers keep their parameters. Their FP8 weights lie stacked by rows under one scale, so that forward is one
product, backward's dgrad adds up what the layers give by itself, and one wgrad gives all their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from fp8booster.kernels.device import require_fp8
from fp8booster.nn.fused.layers_of_one_input import LayersOfOneInput
from fp8booster.nn.linear.functional import Defer, linear_from_quantized
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.linear.shared_input import share_input
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import held_by_modules, must_be_called
from fp8booster.nn.weights.cached import CachedWeight
from fp8booster.nn.weights.freshness import reusable
from fp8booster.nn.weights.source import WeightSource


class MergedLayers(LayersOfOneInput):
    """Linear layers of one input whose products are computed as one where that is right.

    A copy or a pickle of it holds no FP8 weight, and knows nothing of engines.

    Args:
        layers: in the order of their outputs.
    """

    fp8_weight: WeightSource
    """Of all the weights, stacked by rows; each layer keeps one of its own, for when they run one by one."""

    def __init__(self, layers: Sequence[FP8Layer]) -> None:
        super().__init__(layers)
        self._reasons: dict[str, None] = {}
        self.fp8_weight = CachedWeight()

    @property
    def why_not_merged(self) -> str | None:
        """Why the layers' products run one by one in training, as far as it is known; None where they run as one."""
        return self._why_never() or ", ".join(self._reasons) or None

    def __call__(self, input: torch.Tensor) -> torch.Tensor | None:
        """All outputs side by side, [..., sum of output features], or None: call the layers one by one.

        They are, where one of them is no plain FP8 layer of the others' configuration or has hooks that must run; where
        BF16 is faster; in evaluation; and in compiled code, where the compiler sees the layers themselves.
        """
        if not self._can_merge(input):
            return None
        return self._product(input)

    def _product(self, input: torch.Tensor) -> torch.Tensor | None:
        first, weights = self.layers[0], self.weights
        config = first.fp8_config
        exchange = first.fp8_exchange()
        rows = input.numel() // input.shape[-1] * exchange.growth
        if not computes_in_fp8(config, rows, input.shape[-1], sum(map(len, weights)), input.device):
            return None
        for layer in self.layers:
            layer.in_fp8[rows] = True
        require_fp8(input.device, config.emulate)
        x = share_input(
            input,
            config,
            transposed=torch.is_grad_enabled() and any(weight.requires_grad for weight in weights),
            exchange=exchange,
        )
        biases = [layer.bias for layer in self.layers]
        return linear_from_quantized(
            input,
            _SideBySide.apply(*weights),
            None if biases[0] is None else torch.cat(biases),
            x,
            self.fp8_weight.forward(weights, config, transpose=config.keeps_transposes),
            config,
            defer=self._defer(),
            exchange=exchange,
            backward_weight=self.fp8_weight.backward(weights, config),
        )

    def _defer(self) -> Defer | None:
        """What hands each layer its rows of the one gradient, later."""
        trained = [layer.weight.requires_grad for layer in self.layers]
        by_layer = [layer.fp8_defer() for layer in self.layers]
        if None in by_layer:
            return None

        def defer(compute: Callable[[], torch.Tensor]) -> None:
            parts = _Parts(compute, [len(weight) for weight in self.weights], sum(trained))
            for number, give in enumerate(by_layer):
                if trained[number]:
                    give(partial(parts.take, number))

        return defer

    def _can_merge(self, input: torch.Tensor) -> bool:
        training = all(layer.training for layer in self.layers)
        if not (training and input.numel() and reusable(input, self.layers[0].weight)):
            return False
        reason = self._why_not(input)
        if reason is not None:
            self._reasons[reason] = None
        return reason is None

    def _why_not(self, input: torch.Tensor) -> str | None:
        """Why the layers cannot run as one on this input, in training."""
        reason = self._why_never()
        if reason is not None:
            return reason
        if torch.is_autocast_enabled(input.device.type):
            return "under autocast"
        together = self.fp8_weight.is_provided(self.weights)
        for layer in self.layers:
            if layer.weight.dtype != input.dtype:
                return "the input's dtype is not the weight's"
            if not together and layer.fp8_weight.is_provided([layer.weight]):
                return "the FP8 weights do not lie together"
        return None

    def _why_never(self) -> str | None:
        """Why the layers, as they are, cannot run as one on any input."""
        if self.fp8_weight.refusal is not None or self._why_replaced is not None:
            return self.fp8_weight.refusal or self._why_replaced
        first = self.layers[0]
        if not all(isinstance(layer, FP8Layer) for layer in self.layers):
            return "a layer was taken out of FP8"
        config, common = first.fp8_config, first.fp8_merges_by()
        for layer in self.layers:
            if layer.fp8_merges_by() is None:
                return f"{type(layer).__name__} has no merged form here"
            if layer.fp8_merges_by() != common:
                return "the layers are sharded in different ways"
            if layer.fp8_config != config:
                return "the layers' FP8Configs differ"
            if (layer.bias is None) != (first.bias is None):
                return "only some of the layers have a bias"
            if must_be_called(layer):
                return "a layer has hooks or a forward of its own, which must run"
        return "rowwise scales" if config.rowwise else None

    def __reduce__(self) -> tuple:
        return type(self), (self.layers,)


def merged_layers(model: nn.Module) -> list[MergedLayers]:
    """Those that the modules of a model hold as attributes."""
    return held_by_modules(model, MergedLayers)


class _SideBySide(torch.autograd.Function):
    """Stands for weights stacked by rows, without their values: what it is for is to hand on their gradients."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, *weights: torch.Tensor) -> torch.Tensor:
        ctx.rows = [len(weight) for weight in weights]
        ctx.set_materialize_grads(False)
        return weights[0].new_zeros(()).expand(sum(ctx.rows), weights[0].shape[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor | None) -> tuple:
        # None: it is computed later
        return (None,) * len(ctx.rows) if gradient is None else gradient.split(ctx.rows)


class _Parts:
    """A matrix that is computed when the first part of it is asked for, and dropped with the last."""

    def __init__(self, compute: Callable[[], torch.Tensor], rows: list[int], readers: int) -> None:
        self._compute, self._rows, self._readers = compute, rows, readers
        self._whole: torch.Tensor | None = None

    def take(self, number: int) -> torch.Tensor:
        """The rows of one part, once."""
        if self._whole is None:
            self._whole, self._compute = self._compute(), None
        part = self._whole.split(self._rows)[number]
        self._readers -= 1
        if self._readers == 0:
            self._whole = None
        return part

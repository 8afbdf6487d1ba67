"""Several linear layers that read one input, as one product: q, k and v, or gate and up.

The layers keep their parameters. Their FP8 weights lie one below the other under one scale, so that forward is one
product, backward's dgrad adds up what the layers give by itself, and one wgrad gives all their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn.choice import computes_in_fp8
from fp8booster.nn.functional import Defer, LateWeight, linear_from_quantized, quantize_weight
from fp8booster.nn.fused.one_input import LayersOfOneInput
from fp8booster.nn.fused.rows import one_below_the_other
from fp8booster.nn.held import held_by_modules
from fp8booster.nn.layer import FP8Layer
from fp8booster.nn.past_forward import must_be_called
from fp8booster.nn.shared_input import share_input
from fp8booster.nn.weight_cache import MadeForStep, reusable, wait_for
from fp8booster.tensor import QuantizedMatrix


class LentWeight(Protocol):
    """The FP8 weight of merged layers whose weights are whole only while they run."""

    def get(self, weights: Sequence[torch.Tensor], config: FP8Config) -> QuantizedMatrix:
        """The weight for forward, [sum of output features, input features]; it may have no transpose."""

    def in_backward(self, weights: Sequence[torch.Tensor], config: FP8Config) -> LateWeight:
        """Where backward gets the transpose."""


class MergedLayers(LayersOfOneInput):
    """Linear layers of one input whose products are computed as one where that is right.

    A copy or a pickle of it holds no FP8 weight, and knows nothing of engines.

    Args:
        layers: in the order of their outputs.
    """

    lent: LentWeight | None = None
    """Gives the FP8 weight, where an engine gathers the weights for forward and again for backward."""

    def __init__(self, layers: Sequence[FP8Layer]) -> None:
        super().__init__(layers)
        self._reasons: dict[str, None] = {}
        self._engines_reason: str | None = None
        self._cast: MadeForStep[QuantizedMatrix] = MadeForStep()
        self._drop_kept()

    @property
    def why_apart(self) -> str | None:
        """Why the layers' products run one by one in training, as far as it is known; None where they run as one."""
        return self._why_never() or ", ".join(self._reasons) or None

    def keep_apart(self, reason: str) -> None:
        """Run the layers one by one, for their weights cannot lie together in an engine."""
        self._engines_reason = reason

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
        rows = input.numel() // input.shape[-1] * (1 if exchange is None else exchange.growth)
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
            self._weight(weights) if self.lent is None else self.lent.get(weights, config),
            config,
            defer=self._defer(),
            exchange=exchange,
            late_weight=None if self.lent is None else self.lent.in_backward(weights, config),
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
        kept, config = self._is_kept_by_engine(), self.layers[0].fp8_config
        for layer in self.layers:
            if layer.weight.dtype != input.dtype:
                return "the input's dtype is not the weight's"
            if self.lent is None and (
                (not kept and layer.fp8_weight.is_kept_by_engine(layer.weight))
                or layer.fp8_weight.in_backward(layer.weight, config) is not None
            ):
                return "the FP8 weights do not lie together"
        return None

    def _why_never(self) -> str | None:
        """Why the layers, as they are, cannot run as one on any input."""
        if self._engines_reason is not None or self._why_replaced is not None:
            return self._engines_reason or self._why_replaced
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

    def _weight(self, weights: list[torch.Tensor]) -> QuantizedMatrix:
        """The FP8 weight, cast once per optimizer step as `weight_cache` does for one layer."""
        if self._is_kept_by_engine():
            wait_for(self._ready)
            return self._quantized
        self._drop_kept()  # no longer what the weights are
        return self._cast.get(self.layers, partial(self._cast_of, weights))

    def _cast_of(self, weights: list[torch.Tensor]) -> QuantizedMatrix:
        config = self.layers[0].fp8_config
        return quantize_weight(one_below_the_other(weights), config, transposed=config.keeps_transposes)

    def keep(self, quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None) -> None:
        """Hold an FP8 weight that an engine makes together with the layers' weights, as `WeightCache.keep` does."""
        self._cast.forget()
        self._quantized, self._ready = quantized, ready
        self._kept_for = self._places()

    def _is_kept_by_engine(self) -> bool:
        return self._kept_for == self._places()

    def _places(self) -> list[tuple[int, int, int]]:
        return [
            (layer.weight.data_ptr(), layer.weight._version, layer.fp8_weight.clears) for layer in self.layers
        ]

    def __reduce__(self) -> tuple:
        return type(self), (self.layers,)

    def _drop_kept(self) -> None:
        self._kept_for: list[tuple[int, int, int]] = []
        self._quantized: QuantizedMatrix | None = None
        self._ready: torch.cuda.Event | None = None


def merged_layers(model: nn.Module) -> list[MergedLayers]:
    """Those that the modules of a model hold as attributes."""
    return held_by_modules(model, MergedLayers)


class _SideBySide(torch.autograd.Function):
    """Stands for weights one below the other, without their values: what it is for is to hand on their gradients."""

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

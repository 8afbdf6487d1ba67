"""Several linear layers that read one input, as one product: q, k and v, or gate and up.

The layers keep their parameters. Forward is one product, dgrad adds up what the layers give by itself, and one wgrad
gives all their gradients. `MergedLayers` has FP8 copies of the weights stacked by rows under one scale. `MergedLinears`
is for nn.Linear: there the parameters themselves are moved once, stacked by rows, so that no step copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.operators import without_autocast
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.linear.functional import Defer, linear_from_quantized
from fp8booster.nn.linear.inputs import is_plain
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear, config_around, held_weight, without_adapter
from fp8booster.nn.linear.shared_input import share_input
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import held_by_modules, hooks_of, must_be_called
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import delivered_recipe
from fp8booster.nn.weights.freshness import reusable
from fp8booster.nn.weights.source import CachedWeight, WeightSource
from fp8booster.nn.weights.stacking import are_stacked, holders, stack_rows, stacked_view

_in_training = attrgetter("training")
_may_be_filled = attrgetter("fp8_weight.may_be_filled")
_version = attrgetter("_version")


class Merged:
    """Linear layers of one input, held as an attribute of the module that has them.

    Args:
        layers: in the order of their outputs.
    """

    layers: tuple[nn.Linear, ...]

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self.layers = tuple(layers)
        self._why_replaced: str | None = None

    @property
    def weights(self) -> list[Tensor]:
        """The layers' weights, in the order of their outputs; those of FP8 layers may have no values in 16 bits."""
        return list(map(held_weight, self.layers))

    @property
    def why_not_merged(self) -> str | None:
        """The reason why the products run one by one in training, as far as it is known; None: they run as one."""
        return self._why_never()

    @property
    def fused_config(self) -> FP8Config | None:
        """The configuration of what is fused around the layers; None: they are not in FP8."""
        return None

    def __call__(self, input: Tensor) -> Tensor | None:
        """Return all outputs side by side, [..., sum of output features], or None: call the layers one by one.

        They are, where `why_not_merged` has a reason; in evaluation; and in compiled code, where the compiler sees the
        layers themselves. Under autocast the outputs are of its dtype, whatever the input and the weights have.
        """
        raise NotImplementedError

    def stands_for(self, *called: nn.Module) -> bool:
        """Tell whether these are the layers still: one may be replaced, or have an adapter of peft's, since.

        Args:
            called: what the module that has the layers would call one by one now.
        """
        why = None
        if called != self.layers:
            bare = tuple(map(without_adapter, called))
            why = "the layers have adapters" if bare == self.layers else "a layer was replaced"
        if why != self._why_replaced:  # compiled code would write it at every call
            self._why_replaced = why
        return why is None

    def _bias(self) -> Tensor | None:
        held = self.layers[0]._parameters
        # torch looks a parameter up by a function in Python
        if (held["bias"] if "bias" in held else self.layers[0].bias) is None:
            return None
        biases: list[Tensor] = [layer.bias for layer in self.layers]
        with without_autocast(biases[0].device.type):
            return torch.cat(biases)

    def _why_never(self) -> str | None:
        """Return why the layers, as they are, cannot run as one on any input."""
        if self._why_replaced is not None:
            return self._why_replaced
        first = self.layers[0]
        for layer in self.layers:
            if (reason := self._why_unlike(layer, first)) is not None:
                return reason
            if layer is not first and (layer.bias is None) != (first.bias is None):
                return "only some of the layers have a bias"
            if must_be_called(layer):
                return "a layer has hooks or a forward of its own, which must run"
        return None

    def _why_unlike(self, layer: nn.Module, first: nn.Module) -> str | None:
        raise NotImplementedError


class MergedLayers(Merged):
    """FP8 layers of one input whose products are computed as one where that is right.

    A copy or a pickle of it holds no FP8 weight, and knows nothing of engines.
    """

    layers: tuple[FP8Linear, ...]

    fp8_weight: WeightSource
    """Of all the weights, stacked by rows; each layer keeps one of its own, for when they run one by one."""

    fp8_casts: Casts  # casts the operands of the one product

    def __init__(self, layers: Sequence[FP8Linear]) -> None:
        super().__init__(layers)
        self._reasons: dict[str, None] = {}
        self.fp8_weight = CachedWeight()
        self.fp8_casts = Casts.of_layer(layers[0].fp8_config)

    @property
    def why_not_merged(self) -> str | None:
        """As `Merged.why_not_merged`, with what batches so far have shown."""
        return self._why_never() or ", ".join(self._reasons) or None

    @property
    def fused_config(self) -> FP8Config | None:
        """As `Merged.fused_config`; a layer may have been taken out of FP8 since."""
        casts = vars(self.layers[0]).get("fp8_casts")
        return config_around(self.layers) if casts is None else casts.config

    def __call__(self, input: Tensor) -> Tensor | None:
        """As `Merged.__call__`: in 16 bits where that is faster, or None there if ranks share the input."""
        if not (all(map(_in_training, self.layers)) and is_plain(input) and input.numel()):
            return None
        if FrozenFP8Linear in map(type, self.layers):  # it has no merged form, and to look at its weight decodes it
            return None
        # the GPU of a small model waits for the host here, so the usual case is told by one look
        weights = None if torch.compiler.is_compiling() else self._weights_of_usual_layers()
        never = None
        if weights is None:
            weights, never = self.weights, self._why_never()
        if not reusable(input, weights[0]):
            return None
        reason = never or self._why_not(input, weights)
        if reason is not None:
            self._reasons[reason] = None
            return None
        return self._product(input, weights)

    def _weights_of_usual_layers(self) -> list[Tensor] | None:
        """Return the weights of layers for which `_why_never` has no reason at first sight: None: it must be asked."""
        if self._why_replaced is not None or self.fp8_weight.refusal is not None:
            return None
        weights, seen = [], set()
        for layer in self.layers:
            held = vars(layer)
            weight, bias = map(held["_parameters"].get, ("weight", "bias"))
            if type(layer) is not FP8Linear or weight is None or "forward" in held or any(hooks_of(layer)):
                return None
            config = held["fp8_casts"].config
            weights.append(weight)
            seen.add((id(config), bias is None))
        return weights if len(seen) == 1 and not config.rowwise else None

    def _product(self, input: Tensor, weights: Sequence[Tensor]) -> Tensor | None:
        first = self.layers[0]
        config, exchange = first.fp8_config, first.fp8_exchange()
        # the layers may have been converted anew since, with other options
        casts = self.fp8_casts = self.fp8_casts.under(config)
        rows = input.numel() // input.shape[-1] * (1 if exchange is None else exchange.growth)
        outputs, for_weight = 0, False
        for weight in weights:
            outputs += weight.shape[0]
            for_weight |= weight.requires_grad
        always = self.fp8_weight.always
        in_fp8 = always or computes_in_fp8(config, rows, input.shape[-1], outputs, input.device)
        if not in_fp8 and exchange is not None:
            return None
        for layer in self.layers:  # the report asks each by itself
            if layer.in_fp8.get(rows) is not in_fp8:
                if in_fp8:
                    require_fp8(input.device, config.emulate, config.granularity)
                layer.in_fp8[rows] = in_fp8
        if not in_fp8:  # weights so small that a copy of them side by side costs nothing
            return _product_of_stacked(input, stack_rows(weights), weights, self._bias())
        for_weight &= torch.is_grad_enabled()
        alone = exchange is None or exchange.input_key is None
        recipe = delivered_recipe(input) if for_weight and alone else None
        return linear_from_quantized(
            input,
            weights,
            self._bias(),
            share_input(input, casts, reader=self, transposed=for_weight and recipe is None, exchange=exchange),
            self.fp8_weight.forward(weights, casts, transpose=config.keeps_transposes),
            casts,
            defer=self._defer(),
            exchange=exchange,
            backward_weight=self.fp8_weight.backward(weights, casts),
            recipe=recipe,
        )

    def _defer(self) -> Defer | None:
        """Return what hands each layer its rows of the one gradient, later."""
        # all or none: one product gives the gradients of all
        by_layer: list[Defer] = []
        for layer in self.layers:
            if (give := layer.fp8_defer()) is None:
                return None
            by_layer.append(give)

        def defer(compute: Callable[[], Tensor]) -> None:
            rows = _DeferredRows(compute, [len(weight) for weight in self.weights])
            for number, (layer, give) in enumerate(zip(self.layers, by_layer, strict=True)):
                if layer.held_weight.requires_grad:
                    give(partial(rows.take, number))

        return defer

    def _why_not(self, input: Tensor, weights: Sequence[Tensor]) -> str | None:
        """Return why the layers, which can run as one in training, cannot on this input."""
        for weight in weights:
            if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
                return "the input's dtype is not the weight's"
        if any(map(_may_be_filled, self.layers)) and not self.fp8_weight.is_provided(weights):
            for layer, weight in zip(self.layers, weights, strict=True):
                if layer.fp8_weight.is_provided([weight]):
                    return "the FP8 weights do not lie together"
        return None

    def _why_never(self) -> str | None:
        reason = self.fp8_weight.refusal or super()._why_never()
        return "rowwise scales" if reason is None and self.layers[0].fp8_config.rowwise else reason

    def _why_unlike(self, layer: nn.Module, first: nn.Module) -> str | None:
        if not (isinstance(layer, FP8Layer) and isinstance(first, FP8Layer)):
            return "a layer was taken out of FP8"
        merges_by = layer.fp8_merges_by()
        if merges_by is None:
            return f"{type(layer).__name__} has no merged form here"
        if layer is first:
            return None
        if merges_by != first.fp8_merges_by():
            return "the layers are sharded in different ways"
        alike = layer.fp8_config is first.fp8_config or layer.fp8_config == first.fp8_config
        return None if alike else "the layers' FP8Configs differ"

    def __reduce__(self) -> tuple:
        return type(self), (self.layers,)


class MergedLinears(Merged):
    """nn.Linear layers of one input whose products are computed as one, in their own precision, where that is right.

    Args:
        layers: in the order of their outputs; their weights are moved, to be stacked by rows, where nothing else holds
            their memory.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(layers)
        self._why_moved = _lay_together(self.weights)

    def __call__(self, input: Tensor) -> Tensor | None:
        if (
            torch.compiler.is_compiling()
            or not all(map(_in_training, self.layers))
            or input.numel() == 0
            or (input.dtype != self.layers[0].weight.dtype and not torch.is_autocast_enabled(input.device.type))
            or self._why_never() is not None
        ):
            return None
        weights = self.weights
        return _product_of_stacked(input, stacked_view(weights), weights, self._bias())

    def _why_never(self) -> str | None:
        return super()._why_never() or (None if are_stacked(self.weights) else self._why_moved)

    def _why_unlike(self, layer: nn.Module, first: nn.Module) -> str | None:
        if type(layer) is not nn.Linear or type(layer.weight) is not nn.Parameter:
            return f"one is a {type(layer).__name__} with a weight of class {type(layer.weight).__name__}"
        return None if layer.weight.dtype == first.weight.dtype else "the layers' dtypes differ"


_MOVED = "their weights have moved since; fuse the model when it has its dtype and device, and no copy of it"


def _lay_together(weights: Sequence[Tensor]) -> str:
    """Move weights stacked by rows; return why they do not lie so, if ever they do not."""
    alone = holders(torch.empty(1, dtype=torch.uint8, device="cpu"))
    for weight in weights:
        if type(weight) is not nn.Parameter or weight.is_meta:
            return "their weights are not plain parameters"
        first = weights[0]
        if (weight.dtype, weight.device, weight.shape[1]) != (first.dtype, first.device, first.shape[1]):
            return "their weights do not fit together"
        # an engine writes to the memory that it holds, as ZeRO does when it gathers
        if weight.untyped_storage().nbytes() != weight.nbytes or holders(weight) > alone:
            return "others, such as an engine, hold the memory of their weights; fuse the model before it is boosted"
    with torch.no_grad():
        whole = torch.cat([weight.detach() for weight in weights])
        # by `.data`: the parameters stay the objects that optimizers and hooks hold
        for weight, part in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
            weight.data = part
    return _MOVED


def merged_layers(model: nn.Module) -> list[MergedLayers]:
    """Return the groups of FP8 layers that the modules of a model hold."""
    return held_by_modules(model, MergedLayers)


def merged_linears(model: nn.Module) -> list[MergedLinears]:
    """Return the groups of nn.Linear layers that the modules of a model hold."""
    return held_by_modules(model, MergedLinears)


def _product_of_stacked(input: Tensor, matrix: Tensor, weights: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """Return the product with a matrix that has weights as its rows, in its own precision, or that of autocast."""
    if _reads_weights_in_backward(input, matrix, weights):
        input, matrix = _Stacked.apply(input, matrix, *weights)
    else:
        _, matrix = _Stacked.apply(None, matrix, *weights)
    return F.linear(input, matrix, bias)


def _reads_weights_in_backward(input: Tensor, matrix: Tensor, weights: Sequence[Tensor]) -> bool:
    """Tell whether the input's gradient is computed from the memory of the weights, and not from a copy of forward."""
    if not input.requires_grad or matrix.data_ptr() != weights[0].data_ptr():
        return False
    device = matrix.device.type
    return not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == matrix.dtype


class _Stacked(torch.autograd.Function):
    """A matrix that stands for weights stacked by rows, each of which gets its rows of the gradient.

    torch sees changes of the matrix between forward and backward as those of the first weight alone. An input that is
    given too is returned as it is, and its gradient has waited for a look at all the weights.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor | None, matrix: Tensor, *weights: Tensor) -> tuple[Tensor | None, Tensor]:
        ctx.rows = [len(weight) for weight in weights]
        ctx.read = weights if ctx.needs_input_grad[0] else ()
        ctx.versions = list(map(_version, ctx.read))
        ctx.set_materialize_grads(False)
        return input, matrix

    @staticmethod
    def backward(ctx: Any, for_input: Tensor | None, gradient: Tensor | None) -> tuple:
        if list(map(_version, ctx.read)) != ctx.versions:
            raise RuntimeError(
                "a weight of layers that are multiplied as one has been modified by an inplace operation since their "
                "forward, and the gradient of their input is computed from it; modify weights after backward"
            )
        # None: it is computed later
        return for_input, None, *((None,) * len(ctx.rows) if gradient is None else gradient.split(ctx.rows))


class _DeferredRows:
    """A gradient that is computed when the first of its rows are asked for."""

    def __init__(self, compute: Callable[[], Tensor], rows: list[int]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._rows = rows
        self._parts: dict[int, Tensor] = {}

    def take(self, number: int) -> Tensor:
        """Return the rows of one weight, once."""
        if self._compute is not None:
            self._parts, self._compute = dict(enumerate(self._compute().split(self._rows))), None
        # whoever takes the last rows frees the whole
        return self._parts.pop(number)

"""The mixin of every layer whose products run in FP8, whatever class of layer it was, and `nn.Linear` in FP8."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.alignment import aligned, multiple_for
from fp8booster.kernels.device import require_fp8
from fp8booster.nn.linear.exchange import Exchange
from fp8booster.nn.linear.functional import Defer, check_operands, linear_from_quantized
from fp8booster.nn.linear.inputs import output_of
from fp8booster.nn.linear.shared_input import opened, share_input
from fp8booster.nn.linear.speed_model import TokenCounts, computes_in_fp8
from fp8booster.nn.modules import change_class, remixed, unmixed
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import RECIPE, delivered_recipe
from fp8booster.nn.weights.freshness import note_change, reusable
from fp8booster.nn.weights.holder import FP8Module
from fp8booster.nn.weights.source import CachedWeight, WeightSource
from fp8booster.reading import first_of
from fp8booster.scaling import INPUT
from fp8booster.tensor import QuantizedMatrix


class _ReadableWeight:
    """`FP8Layer.weight` for whoever reads it without the layer: it has values, also where an engine keeps none.

    A descriptor without `__set__`: attributes of the layer itself, such as the views that FSDP puts there, come first.
    """

    def __get__(self, layer: FP8Layer | None, kind: type | None = None) -> Any:
        if layer is None:
            return self
        held, parameters = layer.__dict__, layer.__dict__.get("_parameters", {})
        if "weight" not in parameters:
            raise AttributeError("weight")  # nn.Module looks among buffers then, and tells
        source = held.get("fp8_weight")
        if source is not None:
            if source.lacks_values:
                _keep_values(source)
            note_read(layer)
        return parameters["weight"]


def note_read(layer: FP8Layer) -> None:
    """Remember that somebody has looked at a layer's weight, which is no sign that its own product ran."""
    if not torch.compiler.is_compiling():
        layer.__dict__[_READ_IN_TRAINING if layer.training else _READ_IN_EVALUATION] = True


@torch.compiler.disable
def _keep_values(source: WeightSource) -> None:
    source.keep_values()


_READ_IN_TRAINING, _READ_IN_EVALUATION = "weight_read_in_training", "weight_read_in_evaluation"
_RAN_IN_EVALUATION = "ran_in_evaluation"


class FP8Layer(FP8Module):
    """A linear layer in FP8: a mixin before the class that the layer was.

    A layer turns into a class of these in place (`convert_in_place`) and back (`revert`): its parameters, hooks and
    identity stay. In training mode the FP8 weight and its transpose are made once per optimizer step, whatever the
    number of micro-batches, and layers that read one input share its cast. In evaluation mode the weight is cast once
    between two steps, and for each call of `train` or `eval`. Where `speed_model` finds BF16 faster for the number of
    tokens, the layer computes in that, unless `config.always`.
    """

    original: ClassVar[type[nn.Module]]
    """The class that the layer was, and is again after `revert`, but for mixins before it."""

    weight_is_transposed: ClassVar[bool] = False
    """The weight lies as [input features, output features], not as nn.Linear's does."""

    weight: torch.Tensor = _ReadableWeight()  # type: ignore[assignment]
    """The weight, for whoever multiplies by it without the layer; the layer itself reads `held_weight`."""

    weight_read_in_training: bool = False
    """Somebody has looked at `weight` in training mode."""

    weight_read_in_evaluation: bool = False
    """Somebody has looked at `weight` in evaluation mode."""

    ran_in_evaluation: bool = False
    """The layer was called in evaluation mode, outside compiled code."""

    fp8_weight: WeightSource
    fp8_casts: Casts
    """Casts the layer's operands in training, where it runs by itself."""

    in_fp8: TokenCounts
    """For the token counts seen so far, whether the products run in FP8."""

    @classmethod
    def convert_in_place(cls, module: nn.Module, config: FP8Config) -> None:
        """Turn a layer into this class in place: its parameters, hooks and identity stay."""
        change_class(module, remixed(type(module), cls))._start_fp8(config)

    def revert(self) -> None:
        """Turn the layer into what it was, in place."""
        del self.fp8_weight, self.fp8_casts, self.in_fp8, self._whole_shape
        self._forget_uses()
        change_class(self, remixed(type(self), self.original))

    def _start_fp8(self, config: FP8Config) -> None:
        if "fp8_weight" in vars(self):
            self.restore_weights()  # an engine before may have left no other copy than the one that goes here
        self._whole_shape = self.held_weight.shape
        self._forget_uses()
        self.fp8_weight = CachedWeight(self.weight_is_transposed)
        self.fp8_casts = Casts.of_layer(config)
        self.in_fp8 = TokenCounts()

    @property
    def fp8_config(self) -> FP8Config:
        """As `FP8Module.fp8_config`."""
        return self.fp8_casts.config

    def weight_holders(self) -> dict[str, FP8Layer]:
        """As `FP8Module.weight_holders`."""
        return {"weight": self}

    def _forget_uses(self) -> None:
        """Count the layer as one that neither ran nor was read."""
        for note in (_READ_IN_TRAINING, _READ_IN_EVALUATION, _RAN_IN_EVALUATION):
            self.__dict__.pop(note, None)

    @property
    def held_weight(self) -> torch.Tensor:
        """The weight as it is, which may have no values in 16 bits."""
        weight = self._parameters.get("weight")
        return self.weight if weight is None else weight  # computed for each forward, or a view of what was gathered

    @property
    def has_run(self) -> bool:
        """Tell whether the layer was called, outside compiled code, on any tokens."""
        return bool(self.in_fp8) or self.ran_in_evaluation

    @classmethod
    def why_not(cls, module: nn.Module) -> str | None:
        """Return why a layer of the class `original` cannot turn into this class, or None where it can."""
        return None

    def fp8_exchange(self) -> Exchange | None:
        """Return what ranks exchange around the layer's products; None: nothing."""
        return None

    def fp8_defer(self) -> Defer | None:
        """Return what computes the weight's gradient later, as in `linear_from_quantized`; None: backward does it."""
        return None

    def fp8_merges_by(self) -> Hashable | None:
        """Return a key that layers of one input share whose products may be one; None: this layer's stays its own."""
        return None

    @property
    def product_features(self) -> tuple[int, int]:
        """(input, output features) of this layer's products: of this rank's shard where the weight is sharded."""
        # FSDP with use_orig_params leaves a part of the flattened weight between forwards
        shape = self.held_weight.shape
        rows, columns = shape if len(shape) == 2 else self._whole_shape
        return (rows, columns) if self.weight_is_transposed else (columns, rows)

    def in_product_layout(self, stored: QuantizedMatrix) -> QuantizedMatrix:
        """The FP8 weight as the products read it, [output, input features], from a cast of the weight as it lies."""
        return stored.t() if self.weight_is_transposed else stored

    def fp8_product(self, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The layer's product in FP8, or None where it is to be computed in high precision.

        Args:
            input: [..., input features].
            bias: [output features], added to the product; None adds none.

        Raises:
            ValueError, TypeError, RuntimeError: as `check_operands`.
        """
        if input.numel() == 0:
            return None
        if input.dim() == 0:  # whose tokens cannot be counted
            held = self.held_weight
            check_operands(input, held.t() if self.weight_is_transposed else held, bias)
        casts = self.fp8_casts if self.training else self.fp8_casts.evaluation
        if torch.compiler.is_compiling() and (self.fp8_weight.lacks_values or casts.state is not None):
            # compiled code casts the weight, which has no values where an engine keeps its FP8 copy alone; and it keeps
            # no state
            return torch.compiler.disable(FP8Layer.fp8_product)(self, input, bias)
        weight, exchange = self.held_weight, self.fp8_exchange()
        if weight.numel() == 0:
            return None
        if not self.training:
            self.note_evaluation()
        matrix = weight.t() if self.weight_is_transposed else weight
        again = reusable(input, weight)
        tokens = input.numel() // input.shape[-1]
        if not self._computes_in_fp8(tokens if exchange is None else tokens * exchange.growth, matrix, again):
            return None
        check_operands(input, matrix, bias)
        for_weight = torch.is_grad_enabled() and weight.requires_grad
        recipe = None
        if for_weight and hasattr(input, RECIPE) and (exchange is None or exchange.input_key is None):
            recipe = delivered_recipe(input)  # what ranks gather is not made again from one rank's part
        defer, transposed = self.fp8_defer(), for_weight and recipe is None
        # by channel the weight's cast finds what the input is multiplied by; else the input is cast first, and a
        # checkpointed forward's peak is lower
        w = self.fp8_weight.for_call(weight, casts, input, again) if casts.by_channel else None
        if again and opened.forwards and not casts.by_channel:
            x = share_input(input, casts, reader=self, transposed=transposed, exchange=exchange)
        elif exchange is None:
            x = casts.quantize(INPUT, input, transposed=transposed)
        else:
            x = exchange.input(input, casts, transposed=transposed)
        return linear_from_quantized(
            input,
            weight,
            bias,
            x,
            self.fp8_weight.for_call(weight, casts, input, again) if w is None else w,
            casts,
            defer=defer,
            exchange=exchange,
            weight_is_transposed=self.weight_is_transposed,
            backward_weight=self.fp8_weight.backward([weight], casts),
            recipe=recipe,
        )

    def note_evaluation(self) -> None:
        """Remember that the layer was called in evaluation mode."""
        if not torch.compiler.is_compiling():
            self.__dict__[_RAN_IN_EVALUATION] = True

    def _computes_in_fp8(self, rows: int, matrix: torch.Tensor, again: bool) -> bool:
        """Tell whether FP8 pays for so many tokens; what was found is kept where casts are."""
        if again and rows in self.in_fp8:
            return self.in_fp8[rows]
        outputs, inputs = matrix.shape
        in_fp8 = self.fp8_weight.always or computes_in_fp8(self.fp8_config, rows, inputs, outputs, matrix.device)
        if in_fp8:
            require_fp8(matrix.device, self.fp8_config.emulate, self.fp8_config.granularity)
        if again:
            self.in_fp8[rows] = in_fp8
        return in_fp8

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FP8Layer:
        self.in_fp8.clear()  # what was found to pay on this device
        return cast(FP8Layer, super()._apply(fn, recurse))

    def __getstate__(self) -> dict[str, Any]:
        self.restore_weights()  # what is pickled or copied has values
        return self.__dict__

    def fp8_notes(self) -> str:
        """Return the report's notes: emulation, sizes padded as "from->to", token counts in BF16."""
        notes = ["emulated in FP32"] if self.fp8_config.emulate else []
        notes += self.fp8_weight.notes_of_scaling(self.fp8_casts)
        if self.fp8_weight.was_read:
            notes.append("its 16-bit copy is kept, for its weight is read without it")
        elif self.weight_read_in_evaluation and self.in_fp8 and not self.ran_in_evaluation:
            notes.append("in evaluation its weight was read without it")
        if self.fp8_casts.by_channel:
            notes.append("scales by channel (smooth SwiGLU)")
        tokens = {
            in_fp8: sorted(rows for rows, each in self.in_fp8.items() if each is in_fp8) for in_fp8 in (True, False)
        }
        inputs, outputs = self.product_features
        sizes = [("in", inputs), ("out", outputs), *(("tokens", rows) for rows in tokens[True])]
        multiple = multiple_for(self.fp8_config.granularity)
        padded = [f"{what} {size}->{aligned(size, multiple)}" for what, size in sizes if size % multiple]
        if padded:
            notes.append("padded: " + first_of(padded) + self.in_fp8.note)
        if tokens[False]:
            counts = first_of(list(map(str, tokens[False]))) + " tokens" + self.in_fp8.note
            why = "where it would take longer; FP8Config(always=True) does it"
            notes.append(f"not in FP8 for {counts}, {why}")
        return "; ".join(notes)


def held_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer as it is; that of an FP8 layer may have no values in 16 bits."""
    return layer.held_weight if isinstance(layer, FP8Layer) else cast(torch.Tensor, layer.weight)


def config_around(layers: Iterable[nn.Module | None]) -> FP8Config | None:
    """Return the configuration for what is fused around some layers: the first FP8 layer's; None: none is in FP8."""
    for layer in map(without_adapter, layers):
        if isinstance(layer, FP8Layer):
            return layer.fp8_config
    return None


def without_adapter(layer: nn.Module | None) -> nn.Module | None:
    """A layer, or the one that an adapter of peft's wraps."""
    return None if layer is None else layer._modules.get("base_layer", layer)


def require_own_weights(model: nn.Module) -> None:
    """Raise ValueError where an engine gathers weights for FP8 layers of a model as these are."""
    for module in model.modules():
        if isinstance(module, FP8Layer) and module.fp8_weight.why_not_replaced is not None:
            raise ValueError(module.fp8_weight.why_not_replaced)


def forget_weights(model: nn.Module) -> None:
    """Drop every FP8 weight copy of a model, so that the next forward casts anew.

    Needed only after a change through `.data` that no optimizer step follows.
    """
    for module in model.modules():
        if isinstance(module, FP8Module):
            module.restore_weights()
            module.forget_weights()
    note_change([])  # of what holds copies of several modules' weights


class FP8Linear(FP8Layer, nn.Linear):
    """A linear layer whose three products run in FP8; see `FP8Layer`.

    Args:
        in_features, out_features, bias, device, dtype: as in `nn.Linear`.
        config: formats and accumulation; None is `FP8Config()`.
    """

    original = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        config: FP8Config | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._start_fp8(FP8Config() if config is None else config)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to [..., out_features]; errors as in `fp8_linear`."""
        if not isinstance(input, torch.Tensor) or input.is_nested:  # `is_plain`, without a call
            return output_of(self, input)
        output = self.fp8_product(input, self.bias)
        return F.linear(input, self.held_weight, self.bias) if output is None else output

    def fp8_merges_by(self) -> Hashable | None:
        """Its class, unless it is a subclass, whose forward may be another."""
        # the usual class is told at once: `torch.compile` warns of what is cached
        is_own = type(self) is FP8Linear or unmixed(type(self)) is FP8Linear
        return FP8Linear if is_own else None

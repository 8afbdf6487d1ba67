"""Experts in two parameters of three dimensions, as models of transformers 5 have them, in grouped FP8 products.

    gate_up_proj [G, 2 I, H], down_proj [G, H, I]      of G experts; up_proj [G, I, H] without a gate
    tokens -- cast, laid out by expert --> up --> activation, times the router's weights --> down -- summed --> tokens

transformers tells by attributes of the module how to compute them, whatever its implementation
(`experts_implementation`): whether weights are transposed ([G, H, 2 I] and [G, I, H]), whether there are biases, gates
and a norm behind, and by `_apply_gate` what lies between the products. This reads the same attributes; where FP8 is not
right or not faster the implementation that was chosen runs. All experts of a parameter share one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.activation import RowWeights
from fp8booster.kernels.device import require_fp8
from fp8booster.nn.experts.calls import Calls
from fp8booster.nn.experts.fp8_rows import Rows, read_of
from fp8booster.nn.experts.loads import note_choice
from fp8booster.nn.experts.one_by_one import scale_gradient
from fp8booster.nn.experts.own_code import why_own_code
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.experts.spread import EXCHANGED, Spread, sent_over
from fp8booster.nn.experts.stack import (
    NOT_BF16,
    WeightStack,
    of_parameter,
    pays,
    rows_that_decide,
    run_stacks,
    why_not_bf16,
    why_not_stacked,
)
from fp8booster.nn.fused.activations import fused_kind
from fp8booster.nn.fused.pointwise import Saving, activate
from fp8booster.nn.fused.trials import gates_by_activation
from fp8booster.nn.graphs.eager import COUNTED
from fp8booster.nn.modules import change_class, class_without, mixed_class, run_with, unmixed
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.holder import FP8Module, WeightHolder
from fp8booster.nn.weights.source import CachedWeight, WeightSource
from fp8booster.tensor import QuantizedMatrix

_DOWN = "down_proj"


def are_experts(module: nn.Module) -> bool:
    """Tell whether a module holds experts as transformers 5 does, and says how they are computed."""
    told = vars(module)
    return (
        isinstance(told.get("is_transposed"), bool)
        and isinstance(told.get("has_bias"), bool)
        and hasattr(type(module), "_apply_gate")
        and all(_is_stack(module._parameters.get(name)) for name in _names(module))
    )


def _is_stack(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.dim() == 3


def _names(module: nn.Module) -> tuple[str, str]:
    """Return what a module's two parameters are called."""
    return ("gate_up_proj" if vars(module).get("has_gate", True) else "up_proj"), _DOWN


def why_not(module: nn.Module, config: FP8Config) -> str | None:
    """Return why experts that a module holds cannot compute in FP8, or None where they can."""
    if "forward" in vars(module):
        return "a forward of its own, which must run"
    if (reason := why_own_code(module)) is not None:
        return reason
    shapes = [module._parameters[name].shape for name in _names(module)]  # type: ignore[union-attr]
    sizes = [size for _, *features in shapes for size in features]
    return why_not_stacked(config, sizes, config.finer_scales)


def why_not_called_so(args: tuple, kwargs: dict[str, Any]) -> str | None:
    """Return why a call of experts is none with tokens, their experts and weights; None: it is."""
    tokens, *choice = args if len(args) == 3 and not kwargs else (None,)
    if tokens is None or any(not torch.is_tensor(each) or each.dim() != 2 for each in args):
        return "called otherwise than with tokens, their experts and weights"
    if choice[0].shape != choice[1].shape:
        return "a weight for each expert, not for those of a token alone"
    return None


class FP8Experts(FP8Module):
    """A mixin before the class of a module that holds experts.

    A module turns into a class of these in place (`convert_in_place`) and back (`revert`): its parameters, hooks and
    identity stay. As in an FP8 layer the FP8 weights are made once per optimizer step in training, and at every call in
    evaluation. A copy or a pickle of the module holds none.
    """

    fp8_weights: dict[str, WeightSource]
    """By name of a parameter, where its FP8 copy comes from."""

    fp8_casts: dict[str, Casts]
    """By name of a parameter, what casts the operands of its products in training."""

    fp8_spread: Spread | None = None
    """The ranks over which the experts are spread (`parallel.SpreadExperts`); None: this one holds all of them."""

    is_transposed: bool
    has_bias: bool
    _fp8_calls: dict[bool, Calls]

    @classmethod
    def convert_in_place(cls, module: nn.Module, config: FP8Config) -> None:
        """Turn a module for which `are_experts`, and `why_not` gives no reason, into this class in place."""
        if not isinstance(module, FP8Experts):
            change_class(module, mixed_class(cls, type(module)))
        cast(FP8Experts, module)._start_fp8(config)

    def revert(self) -> None:
        """Turn the module into what it was, in place."""
        del (self.fp8_weights, self.fp8_casts, self._fp8_calls, self._weights_of_engines)
        change_class(self, class_without(FP8Experts, type(self)))

    @property
    def fp8_config(self) -> FP8Config:
        """As `FP8Module.fp8_config`."""
        return self.fp8_casts[_DOWN].config

    def weight_holders(self) -> dict[str, ExpertWeight]:
        """As `FP8Module.weight_holders`."""
        return self._weights_of_engines

    def _start_fp8(self, config: FP8Config) -> None:
        self.fp8_weights = {name: CachedWeight(self.is_transposed) for name in _names(self)}
        self.fp8_casts = {name: Casts.of_layer(config) for name in self.fp8_weights}
        self._fp8_calls = Calls.by_mode()
        self._weights_of_engines = {name: ExpertWeight(self, name) for name in self.fp8_weights}

    @property
    def _is_gated(self) -> bool:
        return vars(self).get("has_gate", True)

    @property
    def has_run(self) -> bool:
        """Tell whether they were called, in FP8 or not."""
        return any(calls.has_any for calls in self._fp8_calls.values())

    @property
    def in_fp8(self) -> bool:
        """Tell whether FP8 products run, or have run for some calls, as far as known: in training, if there was any."""
        return self._known_calls.ran or not self._known_calls.reasons

    @property
    def _known_calls(self) -> Calls:
        return self._fp8_calls[self._fp8_calls[True].has_any]

    @property
    def why_eager(self) -> str | None:
        """The reason why no graph can hold them, as where a call in training was not in FP8; None: one can."""
        if sent_over(self) is not None:
            return EXCHANGED
        return COUNTED if self._fp8_calls[True].reasons else None

    def fp8_notes(self) -> str:
        """Return what the report says besides the precision."""
        notes = ["experts in one parameter, in grouped products"] if self.in_fp8 else []
        if self.in_fp8 and self.fp8_config.emulate:
            notes.append("emulated in FP32")
        if self.in_fp8:
            notes += self.fp8_weights[_DOWN].notes_of_scaling(self.fp8_casts[_DOWN])
        training, evaluation = self._fp8_calls[True], self._fp8_calls[False]
        if training.reasons:
            notes.append(f"not in FP8 for some calls: {training.told}" if training.ran else str(training.told))
        if evaluation.reasons:
            notes.append(f"not in FP8 {'for some calls ' if evaluation.ran else ''}in evaluation: {evaluation.told}")
        return "; ".join(notes)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [T, H], of tokens [T, H] with their experts and these' weights, [T, k], as the module computes it."""
        if sent_over(self) is not None:  # what sends tokens to other ranks' experts calls `run`
            return super().forward(*args, **kwargs)
        mixture = FP8Experts._mixture
        if torch.compiler.is_compiling():  # the host reads how many rows an expert gets
            mixture = torch.compiler.disable(mixture)
        made = mixture(self, *args, **kwargs)
        return self._as_written("forward", *args, **kwargs) if made is None else made

    def _mixture(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        """The same in FP8, or None where it is to be computed in high precision."""
        reason = self._why_not_called_so(args, kwargs)
        if reason is not None:
            self._fp8_calls[self.training].note(reason)
            return None
        return self._in_grouped_products(*args) if self.runs_on(args[0], self._rows_of(args)) else None

    def input_casts(self, tokens: torch.Tensor) -> Casts | None:
        """Return what casts the inputs of the first product, as `spread.HeldExperts` asks."""
        up, down = self.fp8_weights
        if self._why_own_code() or why_not_bf16(tokens, getattr(self, up), getattr(self, down)):
            return None
        return self._casts_now(up)

    def run(self, routed: Routed, factor: float) -> torch.Tensor:
        """Compute the experts of this rank, where they are spread over ranks: a `spread.Run`."""
        if not self.runs_on(read_of(routed.tokens), rows_that_decide(routed.rows, self.training)):
            return self._as_written("run", routed, factor)
        return self._mixed(routed, factor)

    def _as_written(self, method: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what the module's class computes by a method, on values in 16 bits."""
        sources = self.fp8_weights.values()
        for source in sources:
            source.keep_values()

        def compute(module: FP8Experts, *args: Any, **kwargs: Any) -> torch.Tensor:
            return getattr(super(), method)(*args, **kwargs)

        if not any(source.lacks_values for source in sources):
            return compute(self, *args, **kwargs)
        # views: of a parameter autograd would find in backward what it holds then, which may be nothing
        views = {name: parameter.view_as(parameter) for name in self.fp8_weights for parameter in [getattr(self, name)]}
        return run_with(compute, self, views, *args, **kwargs)

    def runs_on(self, tokens: torch.Tensor, rows: float | None) -> bool:
        """Tell whether so many rows in all, or any, made of tokens, are computed in FP8; the report says why not."""
        reason = self._why_not_now(tokens, rows)
        if reason is None:
            require_fp8(tokens.device, self.fp8_config.emulate)
        self._fp8_calls[self.training].note(reason)
        return reason is None

    def _rows_of(self, args: tuple) -> int:
        """Return how many rows a call has."""
        return args[1].numel()

    def _why_not_called_so(self, args: tuple, kwargs: dict[str, Any]) -> str | None:
        return why_not_called_so(args, kwargs)

    def _why_own_code(self) -> str | None:
        """Return why the code of the module's class must run now; None: it need not."""
        return why_own_code(self)

    def _why_not_now(self, tokens: torch.Tensor, rows: float | None) -> str | None:
        """Return why not on these tokens."""
        up, down = (getattr(self, name) for name in self.fp8_weights)
        if (reason := self._why_own_code()) is not None:
            return reason
        if vars(self).get("_is_expert_parallel"):
            return "transformers spreads the experts over ranks"
        if (reason := why_not_bf16(tokens, up, down)) is not None:
            return reason
        experts, *sizes = up.shape
        inputs, outputs = sizes if self.is_transposed else reversed(sizes)
        # in evaluation few tokens need few of the experts, and a cast is of all
        count, always = (experts if self.training else 0), self.fp8_weights[_DOWN].always
        if rows is None or pays(self.fp8_config, count, rows, (inputs, outputs), up.device, always=always):
            return None
        return "too few tokens"

    def _in_grouped_products(self, *args: torch.Tensor) -> torch.Tensor:
        tokens, chosen, weights = args
        note_choice(self, chosen, len(getattr(self, _DOWN)))
        return self._mixed(Routed(tokens, chosen, weights)).to(tokens.dtype)

    def _mixed(self, routed: Routed, factor: float = 1.0) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it; `factor` as in `on_rows`."""
        tokens, count = routed.tokens, len(getattr(self, _DOWN))
        layout, chosen = routed.layout(count), routed.chosen if self.has_bias else None
        if not vars(self).get("has_post_expert_norm"):
            return self.on_rows(tokens, layout, layout, chosen, lambda: routed.weights, factor)
        # a norm sees the rows as they are: their weights come after it. No factor for its parameters, of which each
        # rank has a copy, and a part of the gradient
        rows = self.on_rows(tokens, layout, layout.by_choice(), chosen, factor=factor)
        norm: Any = self.post_expert_norm
        weights = routed.weights
        rows = norm(rows).to(rows.dtype).view(*weights.shape, rows.shape[1])
        rows = rows.masked_fill((routed.chosen >= count).unsqueeze(2), 0)  # a norm may make something of zeros
        return (rows * weights.unsqueeze(2)).sum(1)

    def on_rows(
        self,
        tokens: Rows,
        reads: RowLayout,
        sums: RowLayout,
        chosen: torch.Tensor | None = None,
        weights: Callable[[], torch.Tensor] | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """Return what experts make of tokens, summed, where `runs_on` is true.

        Args:
            tokens: [T, H].
            reads, sums: as in `run_stacks`; the same where there are weights.
            chosen: integers [T, k], the experts of each token, for experts with biases. One that is as large as their
                number has no row.
            weights: gives those of the routers, [T, k], when the first product is queued; None: they are 1.
            factor: multiplies the gradients of the experts' parameters, and not those of the tokens.

        Returns:
            [T, H] BF16, or [T k, H] summed by choice.
        """
        up, down = self.fp8_weights
        count = len(getattr(self, up))
        owners = chosen.clamp(max=count - 1) if chosen is not None and self.has_bias else None

        def activation(x: torch.Tensor) -> torch.Tensor:
            if owners is not None:
                # none where a row pads: such rows stay zeros. Choices without a row share one behind all others
                owned = x.new_zeros(len(x) + 1, count)
                owned.index_put_((reads.places.flatten(), owners.flatten()), x.new_ones(()))
                x = self._add_bias(x, up, owned[:-1], factor)
            return self._activated(x, reads, None if weights is None else weights())

        up_stack, down_stack = (self._stack(name, factor) for name in (up, down))
        y = run_stacks(tokens.to(torch.bfloat16), reads, up_stack, activation, down_stack, sums)
        if owners is not None and chosen is not None:
            # what experts add is summed as they are: times the routers' weights, of which a token has few
            shares = torch.ones_like(owners, dtype=y.dtype) if weights is None else weights().to(y.dtype)
            shares = shares.masked_fill(chosen >= count, 0)
            owned = y.new_zeros(len(y), count)
            places, shares = (each.reshape(*sums.places.shape) for each in (owners, shares))
            y = self._add_bias(y, down, owned.scatter_add(1, places, shares), factor)
        return y

    def _activated(self, x: torch.Tensor, layout: RowLayout, weights: torch.Tensor | None) -> torch.Tensor:
        kind = self._fused_kind
        if kind is not None:
            saving = Saving(in_8_bits=self.fp8_config.saves_in_8_bits)
            of_rows = None if weights is None else RowWeights(weights.contiguous(), layout.choices)
            return activate(x, kind, gated=self._is_gated, saving=saving, weights=of_rows)
        y = self._own_activation(x)
        if weights is not None:
            # each has one row, where its gradient is gathered from; those without a row share one behind all others
            by_row = weights.new_zeros(len(y) + 1).scatter(0, layout.places.flatten(), weights.flatten())[:-1]
            y = y * by_row.unsqueeze(1)
        return y.to(torch.bfloat16)

    @property
    def _fused_kind(self) -> str | None:
        """Return what the kernel between the products computes now; None: the module's own activation runs."""
        if not self.fp8_config.fused:
            return None
        if self._is_gated and ("_apply_gate" in vars(self) or not gates_by_activation(unmixed(type(self)))):
            return None
        return fused_kind(self.act_fn)

    @property
    def _own_activation(self) -> Any:
        """Return what the module has between the products."""
        return self._apply_gate if self._is_gated else self.act_fn

    def _stack(self, name: str, factor: float) -> WeightStack:
        """Return the weights of one parameter; `factor` as in `on_rows`."""
        weight, casts = getattr(self, name), self._casts_now(name)
        return WeightStack([weight], casts, of_parameter(weight, self.fp8_weights[name], casts), factor)

    def _casts_now(self, name: str) -> Casts:
        """Return the casts of one parameter's products, in training or outside of it."""
        return self.fp8_casts[name] if self.training else self.fp8_casts[name].evaluation

    def _add_bias(self, y: torch.Tensor, name: str, shares: torch.Tensor, factor: float) -> torch.Tensor:
        """Return y, [M, N], with the experts' biases times shares, [M, G] BF16: their gradients add up in one order."""
        bias = scale_gradient(getattr(self, f"{name}_bias"), factor)
        return torch.addmm(y, shares, bias.to(y.dtype))


class ExpertWeight:
    """One parameter of experts, as an engine that casts and gathers it sees the weight of a layer.

    Args:
        experts: hold it, and multiply by it.
        name: of the parameter.
    """

    def __init__(self, experts: FP8Experts, name: str) -> None:
        self._experts, self._name = experts, name

    @property
    def held_weight(self) -> torch.Tensor:
        """The parameter, [G, N, K] or transposed."""
        return getattr(self._experts, self._name)

    @property
    def fp8_config(self) -> FP8Config:
        """The experts' configuration."""
        return self._experts.fp8_config

    @property
    def fp8_casts(self) -> Casts:
        """The casts of the parameter's products in training."""
        return self._experts.fp8_casts[self._name]

    @property
    def fp8_weight(self) -> WeightSource:
        """The source of the parameter's FP8 copy."""
        return self._experts.fp8_weights[self._name]

    @fp8_weight.setter
    def fp8_weight(self, source: WeightSource) -> None:
        # another dictionary, as graphs see that an attribute is another object
        self._experts.fp8_weights = {**self._experts.fp8_weights, self._name: source}

    @property
    def weight_is_transposed(self) -> bool:
        """As `FP8Layer.weight_is_transposed`."""
        return self._experts.is_transposed

    @property
    def product_features(self) -> tuple[int, int]:
        """(input, output features) of one expert."""
        *_, rows, columns = self.held_weight.shape
        return (rows, columns) if self.weight_is_transposed else (columns, rows)

    def in_product_layout(self, stored: QuantizedMatrix) -> QuantizedMatrix:
        """As `FP8Layer.in_product_layout`."""
        return stored.t() if self.weight_is_transposed else stored

    def __reduce__(self) -> tuple:
        return ExpertWeight, (self._experts, self._name)


def why_not_in(dtype: torch.dtype, holder: WeightHolder) -> str | None:
    """Return why a weight that computes in a dtype must not be rounded to FP8; None: what computes is FP8."""
    return NOT_BF16 if isinstance(holder, ExpertWeight) and dtype is torch.float16 else None

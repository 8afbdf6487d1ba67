"""The casts of a layer's operands pass through one `Casts`, which holds what the scaling strategy keeps for them.

Not the transpose of an input that backward makes again by the scale of forward, in one pass (`linear.functional`).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.device import is_captured
from fp8booster.nn.weights.delivered import AMAX, delivered_amax
from fp8booster.nn.weights.stacking import are_stacked, stack_rows
from fp8booster.scaling import OUTPUT_GRADIENT, WEIGHT, RealTime, State
from fp8booster.scaling.steps import Steps
from fp8booster.tensor import QuantizedMatrix

Observer = Callable[[str, torch.Tensor, QuantizedMatrix], None]
"""Sees an operand after its cast: the role, the tensor, and what was made of it."""

WeightObserver = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


class Casts:
    """Casts the operands of one layer, or of several that are multiplied as one.

    A copy or a pickle goes on from what the strategy keeps, as a checkpoint does; nobody observes it.

    Args:
        config: formats and scaling.
        new_state: makes what the strategy keeps in training; None: outside training.
    """

    def __init__(self, config: FP8Config, new_state: Callable[[], State | None] | None = None) -> None:
        self.config, self._new_state = config, new_state
        self.in_training = new_state is not None
        self.state = None if new_state is None else new_state()
        self.scaling = config.scaling.without_state if self.state is None else config.scaling
        self.by_channel = self.state is not None and self.state.by_channel
        """As `State.by_channel`."""

        self._steps = Steps.count

        self.observers: list[Observer] = []
        """Called after each cast by `quantize`."""

        self.weight_observers: list[WeightObserver] = []
        """Called by `note_weight`."""

    @classmethod
    def of_layer(cls, config: FP8Config) -> Casts:
        """Return the casts that a layer holds for training."""
        return cls(config, config.scaling.new_state)

    def under(self, config: FP8Config) -> Casts:
        """Return casts with another configuration of the layer; these, if formats and scaling are the same."""
        if config is self.config:
            return self
        if (config.scaling, config.formats) != (self.config.scaling, self.config.formats):
            other = Casts.of_layer(config)
            other.observers, other.weight_observers = self.observers, self.weight_observers
            return other
        self.config = config
        self.__dict__.pop("evaluation", None)  # which has the former configuration
        return self

    @cached_property
    def evaluation(self) -> Casts:
        """The casts of the same layer outside training: they keep nothing, and nobody observes them."""
        return Casts(self.config)

    @property
    def why_not_by_engines(self) -> str | None:
        """Return why no engine casts the weight, under one scale; None where one may."""
        if self.by_channel:
            return "scales by channel"
        return f"{self.config.scaling.name} scales" if self.config.scaling.for_engines is None else None

    @property
    def inputs_have_their_own_scale(self) -> bool:
        """Tell whether an input has one scale, from its amax as it is, and nothing else enters."""
        return isinstance(self.scaling, RealTime) and self.scaling.granularity == "tensorwise"

    def quantize(
        self,
        role: str,
        tensor: torch.Tensor,
        *,
        plain: bool = True,
        transposed: bool = False,
        amax: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedMatrix:
        """Cast a tensor, [..., C], as a matrix of C columns; no gradient flows to it.

        Args:
            role: the operand that it is: `scaling.WEIGHT`, `INPUT` or `OUTPUT_GRADIENT`.
            tensor, plain, transposed, amax: as in `Scaling.cast`; an amax that was delivered with the tensor is known.
            dtype: in place of the format that the configuration gives the role.

        Raises:
            RuntimeError: a strategy with a state, in the capture of a CUDA graph.
        """
        values = tensor.detach() if tensor.requires_grad else tensor
        matrix, config = values.reshape(-1, tensor.shape[-1]), self.config
        # a look for the attribute is cheaper than the call, and most tensors have none
        if amax is None and hasattr(tensor, AMAX):
            amax = delivered_amax(tensor)
        if self.state is not None and is_captured(matrix):
            raise RuntimeError(
                f'FP8Config(scaling="{self.scaling.name}") does not go into a CUDA graph, which cannot tell when a '
                'step begins; use scaling="tensorwise"'
            )
        dtype = config.format_of[role] if dtype is None else dtype
        made = self.scaling.cast(role, matrix, dtype, plain=plain, transposed=transposed, amax=amax, state=self.state)
        if type(made) is not QuantizedMatrix:
            raise TypeError(
                f"{type(self.scaling).__name__}.cast returns a {type(made).__name__}; return an "
                "fp8booster.tensor.QuantizedMatrix"
            )
        # compiled code casts weights at every call
        if role == OUTPUT_GRADIENT and not torch.compiler.is_compiling() and Steps.count == self._steps:
            Steps.backwards += 1
        for observe in self.observers:
            observe(role, tensor, made)
        return made

    def quantize_weight(self, weight: torch.Tensor, *, transposed: bool, plain: bool = True) -> QuantizedMatrix:
        """Cast a weight, [N, K]."""
        return self.quantize(WEIGHT, weight, plain=plain, transposed=transposed)

    def quantize_stack(
        self, weights: Sequence[torch.Tensor], *, plain: bool = True, transposed: bool
    ) -> QuantizedMatrix:
        """Cast weights of as many columns as one matrix, [sum of N, K], without that matrix where nobody reads it."""
        made = None
        if not self.observers and self.state is None and not are_stacked(weights):
            dtype = self.config.format_of[WEIGHT]
            made = self.scaling.cast_stack(WEIGHT, weights, dtype, plain=plain, transposed=transposed)
        return self.quantize_weight(stack_rows(weights), plain=plain, transposed=transposed) if made is None else made

    def note_weight(self, values: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """Show a part of the weight that an engine has cast by itself.

        Args:
            values: [n], high precision.
            data: [n] FP8, what was made of them.
            inverse_scale: float32 [].
        """
        for observe in self.weight_observers:
            observe(values, data, inverse_scale)

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """As `State.saved`."""
        return {} if self.state is None else self.state.saved

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """As `State.load`."""
        if self.state is not None:
            self.state.load(saved)

    def forget_step(self) -> None:
        """As `State.forget_step`."""
        if self.state is not None:
            self.state.forget_step()

    def __reduce__(self) -> tuple:
        return Casts, (_as_pickled(self.config), self._new_state), self.saved

    def __deepcopy__(self, memo: dict[int, Any]) -> Casts:
        other = Casts(self.config, self._new_state)  # both of which no one changes
        other.load(copy.deepcopy(self.saved, memo))
        return other

    def __setstate__(self, saved: dict[str, torch.Tensor]) -> None:
        self.load(saved)


def chosen_before(name: str, module: nn.Module) -> bool:
    """Stand for `FP8Config.layers` in a pickle of layers that it had chosen.

    Raises:
        ValueError: it is asked for layers again.
    """
    raise ValueError(
        "the model was pickled, and the function that its FP8Config.layers was cannot be, as a lambda cannot; give the "
        "configuration again"
    )


@cache
def _as_pickled(config: FP8Config) -> FP8Config:
    """Return a configuration without the choice of layers, unless a pickle finds that by its name."""
    try:
        if isinstance(config.layers, FunctionType) and pickle.dumps(config.layers):
            return config
    except (pickle.PicklingError, AttributeError):
        pass
    return replace(config, layers=chosen_before)

"""Modules that multiply by FP8 copies of their own parameters, and each such parameter as engines see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import look_again
from fp8booster.nn.weights.source import WeightSource
from fp8booster.tensor import QuantizedMatrix


class WeightHolder(Protocol):
    """Multiplies by one weight: an `FP8Layer`, or a parameter of experts (`experts.fp8_experts.ExpertWeight`)."""

    fp8_weight: WeightSource

    @property
    def held_weight(self) -> torch.Tensor:
        """As `FP8Layer.held_weight`."""

    @property
    def fp8_config(self) -> FP8Config:
        """As `FP8Layer.fp8_config`."""

    @property
    def fp8_casts(self) -> Casts:
        """As `FP8Layer.fp8_casts`."""

    @property
    def weight_is_transposed(self) -> bool:
        """As `FP8Layer.weight_is_transposed`."""

    @property
    def product_features(self) -> tuple[int, int]:
        """As `FP8Layer.product_features`."""

    def in_product_layout(self, stored: QuantizedMatrix) -> QuantizedMatrix:
        """As `FP8Layer.in_product_layout`."""


class FP8Module(nn.Module):
    """Base of the mixins of modules that multiply in FP8, linear layers and experts: when their copies are stale."""

    @property
    def fp8_config(self) -> FP8Config:
        """The configuration of the casts and products, from the conversion on."""
        raise NotImplementedError

    def weight_holders(self) -> Mapping[str, WeightHolder]:
        """Return what multiplies by each weight, always the same objects, by the weight's name.

        By that name the module holds a parameter, or what an engine or a parametrization put in its place.
        """
        raise NotImplementedError

    def restore_weights(self) -> None:
        """Give the weights their values in 16 bits again, where an engine keeps none."""
        for holder in self.weight_holders().values():
            holder.fp8_weight.restore_values()

    def forget_weights(self) -> None:
        """Make every FP8 copy of the weights stale, also one that is stacked with others."""
        for name, holder in self.weight_holders().items():
            weight = self._parameters.get(name)  # None: computed for each forward, or another pipeline stage's
            holder.fp8_weight.invalidate([] if weight is None else [weight])

    def train(self, mode: bool = True) -> FP8Module:
        """As `nn.Module.train`; unless it was and stays in training, the weights are looked at again."""
        if not (self.training and mode):
            for name, holder in self.weight_holders().items():
                holder.fp8_weight.end_evaluation()
                if (weight := self._parameters.get(name)) is not None:
                    look_again(weight)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FP8Module:
        # the parameters move to another device or dtype: copies go, which may be all that there is of the weights
        self.restore_weights()
        self.forget_weights()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *arguments: Any, **named: Any) -> None:
        # under FSDP2 what is loaded is the shard, and the gathered weight counts no change; it is done first, for torch
        # swaps no parameters that a copy refers to
        self.forget_weights()
        super()._load_from_state_dict(*arguments, **named)


def weight_holders(module: nn.Module) -> Mapping[str, WeightHolder]:
    """Return `FP8Module.weight_holders` of a module, for engines that cast and gather weights; none: it has none."""
    return module.weight_holders() if isinstance(module, FP8Module) else {}


def restore_weights(module: FP8Module, *_: Any) -> None:
    """Call `FP8Module.restore_weights`, as a hook of state dicts."""
    module.restore_weights()

"""A weight that ZeRO gathers in FP8, those that share its scale, and those that are gathered at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple

import torch
from torch import nn

from fp8booster.comm.statistics import bytes_of_encoded, count_calls
from fp8booster.kernels.shard_cast import cast_shards
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.tensor import QuantizedMatrix

NAME = "weight gather"
"""The row of `fp8booster.comm.statistics`: a call for each weight and group that it is gathered over."""

GATHER = "all_gather_into_tensor"
"""The plain collective of that row."""


class Filled(NamedTuple):
    """A source, and what it is filled with."""

    holder: FP8Layer | MergedLayers
    source: EngineWeight
    weights: list[nn.Parameter]
    quantized: QuantizedMatrix

    def fill(self, ready: torch.cuda.Event | None = None) -> None:
        """Hand the holder what was gathered; `ready` as in `EngineWeight.fill`."""
        if self.holder.fp8_weight is not self.source:  # converted again since
            self.holder.fp8_weight = self.source
        self.source.fill(self.weights, self.quantized, ready)

    def is_right(self) -> bool:
        """Tell whether the weights, as they are, are what was gathered."""
        return self.source.is_provided(self.weights)


@dataclass(eq=False)
class ScaleGroup:
    """Weights under one scale: those of layers that are multiplied as one, stacked by rows, or a lone one."""

    filled: list[Filled]
    """The source of each weight, and behind them that of all."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those that share the scale."""
        return self.filled[-1].weights

    def fill(self, ready: torch.cuda.Event | None = None) -> None:
        """Hand the layers what was gathered; `ready` as in `EngineWeight.fill`."""
        for filled in self.filled:
            filled.fill(ready)


@dataclass(eq=False)
class GatheredWeight:
    """One weight: the layer that multiplies by it, and the memory that its FP8 copy lives in."""

    layer: FP8Layer
    group: ScaleGroup
    flat: torch.Tensor
    """[shard size * ranks] FP8: the gathered shards, of which the first numel are the weight."""

    quantized: QuantizedMatrix

    released: bool = False
    """The weight has no values in 16 bits now."""

    keeps_16_bits: bool = field(init=False)
    """The weight has values in 16 bits between steps: by the configuration, or as somebody multiplies by it without its
    layer."""

    def __post_init__(self) -> None:
        self.keeps_16_bits = self.layer.fp8_config.keeps_16_bits


class Sent(NamedTuple):
    """What a weight is cast from."""

    weight: GatheredWeight

    shard: torch.Tensor
    """This rank's part of the master weight, on the weight's device."""

    amax: torch.Tensor | None = None
    """Of the shard, where it is known already: float32 [], on the weight's device."""


def keeps_transpose(layer: FP8Layer) -> bool:
    """Whether a layer's FP8 weight lies in memory in both layouts between steps."""
    # one that lies transposed is multiplied in forward by what is not gathered
    return layer.fp8_config.keeps_transposes or layer.weight_is_transposed


class WeightBatch:
    """Weights that are gathered at once, and what of them is the same at every step.

    Args:
        weights: those that share a scale one after the other.
        ranks, rank: of the group over which they are gathered.
    """

    def __init__(self, weights: Sequence[GatheredWeight], ranks: int, rank: int) -> None:
        self.weights = list(weights)
        self.parameters = [each.layer.held_weight for each in weights]
        self.quantized = [each.quantized for each in weights]
        self.inverse_scales = [each.inverse_scale for each in self.quantized]
        self.transposes = [each.quantized.transpose if keeps_transpose(each.layer) else None for each in weights]
        self.written = [tensor for each in self.quantized for tensor in each[:3]]
        groups, device = [each.group for each in weights], self.parameters[0].device
        self.groups = list(dict.fromkeys(groups))
        # pinned, for the host must not wait: where experts get no gradient, other weights are updated at each step
        firsts = torch.tensor(
            [groups.index(group) for group in groups], dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self.firsts = firsts.to(device, non_blocking=True)
        """For each weight the place of the first one that it shares a scale with: int64."""

        self._own = [each.flat.chunk(ranks)[rank] for each in weights]
        self.messages = [
            (each.flat.view(torch.uint8), own.view(torch.uint8)) for each, own in zip(weights, self._own, strict=True)
        ]
        """What is to be gathered of each, and this rank's part of it, as bytes."""

        sizes = [(weight.numel(), own.numel()) for weight, own in zip(self.parameters, self._own, strict=True)]
        self.counts = [max(0, min(size, values - rank * size)) for values, size in sizes]
        """Values in this rank's shard of each, without the padding of the last one."""

        sent = [
            bytes_of_encoded(NAME, ranks, size * weight.element_size(), {GATHER: size, "all_reduce": 4}, GATHER)
            for weight, (_, size) in zip(self.parameters, sizes, strict=True)
        ]
        self._bytes = [sum(column) for column in zip(*sent, strict=True)]

    def cast(self, shards: Sequence[torch.Tensor], amaxes: Sequence[torch.Tensor]) -> None:
        """Cast this rank's shards of the master weights, by the amax of each: into `messages`."""
        columns = shards, amaxes, self._own, self.inverse_scales
        for power_of_two in (False, True):
            rounded_so = [each.layer.fp8_config.power_of_two is power_of_two for each in self.weights]
            if all(rounded_so):
                cast_shards(*columns, power_of_two)
            elif any(rounded_so):
                cast_shards(*(list(compress(column, rounded_so)) for column in columns), power_of_two)
        for each, shard, own, count in zip(self.weights, shards, self._own, self.counts, strict=True):
            if each.layer.fp8_casts.sees_weights:
                each.layer.fp8_casts.note_weight(shard[:count], own[:count], each.quantized.inverse_scale)
        count_calls(NAME, len(self.weights), *self._bytes)

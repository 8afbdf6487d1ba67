"""The cast of weights that are spread over ranks, one for all engines.

ZeRO's flat buffers, FSDP's units and Gemini's chunks differ in where a rank's part of a weight lies, where its FP8
values go, and when these are gathered. Each of them does so in the same steps:

1. `why_not_cast` gives the reason for each weight that is not cast.
2. `scale_groups` puts the weights of layers that are multiplied as one under one scale.
3. `ShardedCast.agree` finds the amaxes of this rank's parts, and the largest over all ranks in one reduction.
4. `ShardedCast.cast` casts the parts into memory that the engine names, and the engine gathers the bytes.
5. `ScaleGroup.lie_in` tells where the gathered matrix is, and `ScaleGroup.fill` hands it to who multiplies by it.

So the bytes that are sent are those that are multiplied: no 16-bit gather, and no second rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist

from fp8booster.comm.transport import agree_on_amax, largest_of_each
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.scales import amaxes_of, scale_of
from fp8booster.kernels.shard_cast import cast_shards
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.weights.engine import fill_all
from fp8booster.nn.weights.holder import WeightHolder
from fp8booster.nn.weights.source import WeightSource
from fp8booster.tensor import QuantizedMatrix

NOT_FP8 = "not the weight of an FP8 layer"


def why_not_cast(
    layer: WeightHolder, *, readers: int = 1, shape: Sequence[int] | None = None, of_engine: str | None = None
) -> str | None:
    """Return why an engine gathers an FP8 layer's weight in 16 bits; None: it casts the weight.

    Args:
        layer: whose weight is trained.
        readers: modules that hold the weight.
        shape: the weight's, where the layer holds a part of it now.
        of_engine: a reason of the engine's own, which comes first.
    """
    if of_engine is not None:
        return of_engine
    if readers > 1:
        return "shared with another module"
    if layer.fp8_casts.why_not_by_engines is not None:
        return layer.fp8_casts.why_not_by_engines
    if any(size % ALIGNMENT for size in shape or layer.product_features):
        return f"size no multiple of {ALIGNMENT}"
    return None


class Filled(NamedTuple):
    """A weight source, and what it is filled with."""

    holder: WeightHolder | MergedLayers
    source: WeightSource
    weights: list[torch.Tensor]
    quantized: QuantizedMatrix

    def is_right(self) -> bool:
        """Tell whether the weights, as they are, are what was gathered."""
        return self.source.is_provided(self.weights)


def fill_layers(filled: Sequence[Filled], ready: torch.cuda.Event | None = None) -> None:
    """Hand layers, of one group or of many, what was gathered; `ready` as in `WeightSource.fill`."""
    for holder, source, _, _ in filled:
        if holder.fp8_weight is not source:  # converted again since
            holder.fp8_weight = source
    if filled:
        # layers must not read the bytes before the gather that `ready` marks
        _, sources, weights, quantized = zip(*filled, strict=True)
        fill_all(sources, weights, quantized, ready)


@dataclass(eq=False)
class ScaleGroup:
    """Weights under one scale: those of layers that are multiplied as one, stacked by rows, or a lone one."""

    layers: Sequence[WeightHolder]

    merged: MergedLayers | None = None
    """Multiplies the layers' weights as one."""

    parts: list[QuantizedMatrix] = field(default_factory=list)
    """The FP8 matrix of each weight, as the weight lies."""

    filled: list[Filled] = field(default_factory=list)
    """The source of each weight, and behind them that of all."""

    def lie_in(self, whole: QuantizedMatrix) -> None:
        """Let the weights be parts of a matrix: its rows, and the columns of its transpose if it has one.

        Args:
            whole: [sum of N, K], in memory that is gathered into.
        """
        data, transpose, inverse_scale, _ = whole
        self.parts = [whole]
        if len(self.layers) > 1:
            rows = [layer.product_features[1] for layer in self.layers]
            columns = transpose.split(rows, 1) if transpose.dim() == 2 else [transpose] * len(rows)
            # views, without a copy: rows of one matrix lie together, and columns of its transpose
            pairs = zip(data.split(rows), columns, strict=True)
            self.parts = [QuantizedMatrix(*pair, inverse_scale, None) for pair in pairs]
        weights = [layer.held_weight for layer in self.layers]
        self.filled = [
            Filled(layer, layer.fp8_weight, [weight], layer.in_product_layout(part))
            for layer, weight, part in zip(self.layers, weights, self.parts, strict=True)
        ]
        if self.merged is not None:
            self.filled.append(Filled(self.merged, self.merged.fp8_weight, weights, whole))

    def fill(self, ready: torch.cuda.Event | None = None) -> None:
        """Hand the layers what was gathered; `ready` as in `WeightSource.fill`."""
        fill_layers(self.filled, ready)

    def forget(self) -> None:
        """Take from the layers what they were filled with, and refer to its memory no longer."""
        for filled in self.filled:
            filled.source.forget()
        self.parts, self.filled = [], []


def scale_groups(
    layers: Iterable[WeightHolder], merged: Iterable[MergedLayers], why_apart: Callable[[MergedLayers], str | None]
) -> list[ScaleGroup]:
    """Group the layers whose weights an engine casts, in their order.

    Layers that would be multiplied as one and cannot be cast so get the reason, and run one by one. Those of which the
    engine casts none are left alone: they are cast together where they run.

    Args:
        layers: whose weights are cast.
        merged: of the model.
        why_apart: why the engine cannot gather the weights into one matrix, all of which it casts; None: it can.
    """
    groups: dict[WeightHolder, ScaleGroup | None] = dict.fromkeys(layers)
    for each in merged:
        cast = [layer in groups for layer in each.layers]
        if any(cast):
            # with one weight cast elsewhere, by a scale of its own, no matrix of all has one scale
            reason = why_apart(each) if all(cast) else "only some of the weights are gathered in FP8"
            each.fp8_weight.refusal = reason
            if reason is None:
                groups |= dict.fromkeys(each.layers, ScaleGroup(each.layers, each))
    return list(dict.fromkeys(group or ScaleGroup([layer]) for layer, group in groups.items()))


class _CastPlan(NamedTuple):
    """What of casts is the same for parts of the same types, devices and sizes."""

    unwritten: list[tuple[torch.dtype, bool, list[int]]]
    """Places of parts whose inverse scales no launch writes, by format and rounding of scales."""

    launches: list[tuple[torch.device, bool, bool, list[int]]]
    """Device, rounding of scales, whether parts come from another device, and their places."""


_KIND, _DEVICE = attrgetter("dtype", "device"), attrgetter("device")


class ShardedCast:
    """Casts this rank's parts of weights, each by the scale of its group.

    Parts, amaxes, memory and scales are given for each weight, in the order of the groups and of the layers in each.

    Args:
        groups: of the weights, the same on every rank.
        device: of amaxes and scales.
        counts: values of each part, without the padding behind them; None: no part is padded.
    """

    def __init__(self, groups: Sequence[ScaleGroup], device: torch.device, counts: Sequence[int] | None = None) -> None:
        self.layers = [layer for group in groups for layer in group.layers]
        self.device, self.counts = device, counts
        scalings = [layer.fp8_config.scaling.for_engines for layer in self.layers]
        self._power_of_two = [scaling is not None and scaling.power_of_two for scaling in scalings]
        self._planned_for: tuple | None = None
        self._plan = _CastPlan([], [])
        # on the device, so that groups are told apart without the host's looking at amaxes
        self.firsts: torch.Tensor | None = None
        """For each weight the place of the first one that it shares a scale with, int64; None: none shares."""
        if len(groups) < len(self.layers):
            firsts: list[int] = []
            for group in groups:
                firsts += [len(firsts)] * len(group.layers)
            # pinned, for the host must not wait: where experts get no gradient, others are updated at each step
            made = torch.tensor(firsts, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
            self.firsts = made.to(device, non_blocking=True)

    def agree(
        self,
        shards: Sequence[torch.Tensor],
        ranks: dist.ProcessGroup | None,
        known: Sequence[torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """Return the amax that each weight is cast by, float32 [weights]: the largest of its group over all ranks.

        Args:
            shards: [n] each, this rank's part of each weight in high precision; empty where it has none.
            ranks: hold the parts.
            known: the amax of each part, float32 [], where an optimizer found it; None: it is found here.
        """
        # an optimizer that has just written the values need not have them read again
        amaxes = list(known or [None] * len(shards))
        # what is offloaded is read where it lies: only its amax comes here
        away = [place for place, amax in enumerate(amaxes) if amax is None and shards[place].device != self.device]
        if away:
            found = torch.stack(amaxes_of([shards[place] for place in away])).to(self.device)
            for place, amax in zip(away, found.unbind(), strict=True):
                amaxes[place] = amax
        if self.counts is not None:  # an optimizer may make anything of what pads
            given = zip(shards, self.counts, amaxes, strict=True)
            shards = [shard[:count] if amax is None else shard for shard, count, amax in given]
        agreed = agree_on_amax(shards, ranks, amaxes)
        return agreed if self.firsts is None else largest_of_each(agreed, self.firsts)

    def cast(
        self,
        shards: Sequence[torch.Tensor],
        amaxes: torch.Tensor,
        outs: Sequence[torch.Tensor],
        inverse_scales: Sequence[torch.Tensor],
    ) -> None:
        """Cast the parts, and show them to whoever watches the layers' casts.

        Args:
            shards: as in `agree`.
            amaxes: what `agree` returned.
            outs: [n] FP8 each; written.
            inverse_scales: float32 [] each; written, also where another rank has all of the weight.
        """
        where = tuple(map(_KIND, outs)), tuple(map(_DEVICE, shards)), tuple(map(torch.Tensor.numel, outs))
        if where != self._planned_for:
            self._planned_for, self._plan = where, self._planned(outs, shards)
        for dtype, power_of_two, unwritten in self._plan.unwritten:
            scales = scale_of(amaxes, dtype, power_of_two)[1].unbind()
            torch._foreach_copy_([inverse_scales[place] for place in unwritten], [scales[place] for place in unwritten])
        for device, power_of_two, comes, places in self._plan.launches:
            some = [shards[place] for place in places]
            # scales lie on this device alone: where another casts, what its launch writes of them is dropped
            spare = None if device == self.device else torch.empty((), dtype=torch.float32, device=device)
            scale_by = amaxes if len(places) == len(outs) else torch.stack([amaxes[place] for place in places])
            cast_shards(
                [shard.to(device, non_blocking=device.type == "cuda") for shard in some] if comes else some,
                scale_by.to(device),
                [outs[place] for place in places],
                [inverse_scales[place] if spare is None else spare for place in places],
                power_of_two,
            )
        counts = self.counts or [out.numel() for out in outs]
        for layer, shard, out, count, inverse_scale in zip(
            self.layers, shards, outs, counts, inverse_scales, strict=True
        ):
            if layer.fp8_casts.weight_observers and count:  # slices for nobody cost the host more than the loop
                layer.fp8_casts.note_weight(shard[:count], out[:count], inverse_scale)

    def _planned(self, outs: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> _CastPlan:
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        for place, out in enumerate(outs):
            kinds.setdefault((out.dtype, self._power_of_two[place]), []).append(place)
        plan = _CastPlan([], [])
        for (dtype, power_of_two), places in kinds.items():
            # no launch on this device writes the scales of weights that other ranks have all of, or of offloaded ones
            unwritten = [place for place in places if not outs[place].numel() or outs[place].device != self.device]
            if unwritten:
                plan.unwritten.append((dtype, power_of_two, unwritten))
            for device in {outs[place].device for place in places}:
                of_device = [place for place in places if outs[place].device == device and outs[place].numel()]
                here = [place for place in of_device if shards[place].device == device]
                if here:
                    plan.launches.append((device, power_of_two, False, here))
                # what an offloaded master is copied to is freed before the next part is
                away = [place for place in of_device if shards[place].device != device]
                plan.launches.extend((device, power_of_two, True, [place]) for place in away)
        return plan

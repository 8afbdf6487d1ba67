"""The messages in which one FSDP1 unit is gathered: weights of FP8 layers in FP8, other parameters as they are.

Each rank sends one message, and all of them have the size of the longest:

    | FP8 values of its parts of FP8 layers' weights | values of its parts of the other parameters | padding |

Put one after the other, the first parts of all messages are all FP8 weights, whole, in the order of the unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp._flat_param import FlatParameter

from fp8booster import formats
from fp8booster.comm.amax import agree_on_amax, largest_of_each
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.transport import gather_bytes, new_message
from fp8booster.kernels.alignment import ALIGNMENT, aligned
from fp8booster.kernels.scales import new_inverse_scales, scale_of
from fp8booster.kernels.shard_cast import cast_shards, unpack
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.stacking import stack_rows
from fp8booster.tensor import QuantizedMatrix

NAME = "parameter gather"
"""The row of `fp8booster.comm.statistics`: a call for each unit that is gathered."""

NOT_FP8 = "not the weight of an FP8 layer"

_GATHER = "all_gather_into_tensor"


@dataclass(frozen=True)
class Place:
    """Values of the flat parameter that belong together."""

    start: int
    end: int

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The part that lies in a range, counted from the range's start; empty where nothing does."""
        first, last = max(self.start, start), min(self.end, end)
        return (first - start, last - start) if first < last else (0, 0)


@dataclass(frozen=True)
class FP8Place(Place):
    """Those of a weight that is gathered in FP8."""

    layer: FP8Layer
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class ScaleGroup:
    """Weights that are gathered stacked by rows, under one scale: one, or several that are multiplied as one."""

    weights: slice
    """Their places among those that are gathered in FP8."""

    source: ReshardedWeight | None = None
    """Gives several to their one product."""


class FlatWeights:
    """What of a unit is gathered in FP8, and where it lies.

    Args:
        flat_param: of the unit.
        rank, ranks: of the group that it is sharded over.
        merged: layers of the unit that are multiplied as one, or one by one where their weights cannot be stacked.
    """

    def __init__(self, flat_param: FlatParameter, rank: int, ranks: int, merged: Sequence[MergedLayers] = ()) -> None:
        self._rank, self._ranks = rank, ranks
        self._shard_size = flat_param._sharded_size.numel()
        self.reasons: dict[str, str] = {}
        """Why a weight of an FP8 layer is gathered in 16 bits, by its name in the unit."""

        fp8 = sorted(self._chosen(flat_param), key=lambda place: place.start)
        self._fp8 = fp8
        self._groups = self._grouped(merged)
        self._scales: torch.Tensor | None = None  # made once: a copy to a GPU waits
        starts = [0, *(place.end for place in fp8)]
        ends = [*(place.start for place in fp8), self._shard_size * ranks]
        self._plain = [Place(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def _chosen(self, flat_param: FlatParameter) -> Iterator[FP8Place]:
        shared = {(info.prim_module, info.prim_param_name) for info in flat_param._shared_param_infos}
        sizes = flat_param._numels_with_padding
        ranges = zip(accumulate(sizes, initial=0), accumulate(sizes), flat_param._is_padding_mask, strict=False)
        places = [(start, end) for start, end, is_padding in ranges if not is_padding]
        config = None
        for (start, end), info, shape, contiguous, extension in zip(
            places,
            flat_param._param_infos,
            flat_param._shapes,
            flat_param._contiguities,
            flat_param._param_extensions,
            strict=True,
        ):
            layer = info.module
            if not isinstance(layer, FP8Layer) or info.param_name != "weight":
                continue
            reason = None
            if (layer, "weight") in shared:
                reason = "shared with another module"
            elif layer.why_cast_by_itself is not None:
                reason = layer.why_cast_by_itself
            elif any(size % ALIGNMENT for size in shape):
                reason = f"size no multiple of {ALIGNMENT}"
            elif not contiguous or extension is not None:
                reason = "not contiguous"
            elif config is not None and layer.fp8_config != config:
                reason = "another FP8Config in the unit"
            if reason is None:
                config = layer.fp8_config
                yield FP8Place(start, end, layer, shape)
            else:
                self.reasons[f"{info.module_name}.weight"] = reason

    def _grouped(self, merged_layers: Sequence[MergedLayers]) -> list[ScaleGroup]:
        order = [id(place.layer) for place in self._fp8]
        groups = {number: ScaleGroup(slice(number, number + 1)) for number in range(len(order))}
        for merged in merged_layers:
            layers = [id(layer) for layer in merged.layers]
            if not set(layers) & set(order):
                continue  # cast where they run, as the layers are
            first = order.index(layers[0]) if layers[0] in order else 0
            if order[first : first + len(layers)] != layers:
                merged.fp8_weight.refusal = "the weights do not lie side by side in FP8"
                continue
            weights = slice(first, first + len(layers))
            group = ScaleGroup(weights, cast(ReshardedWeight, merged.fp8_weight))
            groups |= dict.fromkeys(range(first, weights.stop), group)
        return list(dict.fromkeys(groups.values()))

    def uncompressed_reason(self, shard: torch.Tensor) -> str | None:
        """Why nothing of the unit is gathered in FP8, or None where something is."""
        if self._ranks == 1:
            return "one rank"
        if not self._fp8:
            return ", ".join(sorted(set(self.reasons.values()))) or NOT_FP8
        if shard.dtype not in formats.HIGH_PRECISION:
            return str(shard.dtype).removeprefix("torch.")
        return None

    def _ranges(self, places: Sequence[Place], rank: int) -> list[tuple[int, int]]:
        """What of each place a rank's shard holds."""
        start = rank * self._shard_size
        return [place.within(start, start + self._shard_size) for place in places]

    @cached_property
    def _fp8_counts(self) -> list[int]:
        """FP8 values in each rank's message."""
        return [sum(end - start for start, end in self._ranges(self._fp8, rank)) for rank in range(self._ranks)]

    def _firsts_of_scale(self, device: torch.device) -> torch.Tensor:
        """For each weight that is gathered in FP8, the first one of those that share its scale."""
        if self._scales is None or self._scales.device != device:
            first = [each.weights.start for each in self._groups for _ in self._fp8[each.weights]]
            self._scales = torch.tensor(first, dtype=torch.int64, device=device)
        return self._scales

    @torch.no_grad()
    def gather(self, shard: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Gather a unit and give the layers their FP8 weights.

        Args:
            shard: [n], this rank's part.
            whole: [n * ranks]; written.
            group: the ranks that hold the parts.
        """
        config = self._fp8[0].layer.fp8_config
        fp8_parts = [shard[start:end] for start, end in self._ranges(self._fp8, self._rank)]
        plain_parts = [shard[start:end] for start, end in self._ranges(self._plain, self._rank)]
        size = max(self._message_size(count, shard) for count in self._fp8_counts)
        message = new_message(shard, size * self._ranks)
        own = message[self._rank * size : (self._rank + 1) * size]

        amaxes = agree_on_amax(fp8_parts, group)
        if len(self._groups) < len(self._fp8):
            amaxes = largest_of_each(amaxes, self._firsts_of_scale(amaxes.device))
        inverse_scales = new_inverse_scales(len(fp8_parts), amaxes.device)
        inverse_scales.copy_(scale_of(amaxes, config.weight_format, config.power_of_two)[1])
        values = own[: self._fp8_counts[self._rank]].view(config.weight_format)
        outs = values.split([part.numel() for part in fp8_parts])
        mine = [each for each, part in enumerate(fp8_parts) if part.numel()]
        if mine:
            given, made, of_made = ([column[each] for each in mine] for column in (fp8_parts, outs, inverse_scales))
            # writes the same scales again
            cast_shards(given, [amaxes[each] for each in mine], made, of_made, config.power_of_two)
            for each, *what in zip(mine, given, made, of_made, strict=True):
                self._fp8[each].layer.fp8_casts.note_weight(*what)
        if any(part.numel() for part in plain_parts):
            self._plain_values(own, self._rank, shard).copy_(torch.cat(plain_parts))
        self._count(shard, size, amaxes.nbytes)
        gather_bytes(message, own, group)
        self._unpack(message.view(self._ranks, size), inverse_scales, shard, whole)

    def _message_size(self, fp8_count: int, shard: torch.Tensor) -> int:
        return aligned(aligned(fp8_count) + (self._shard_size - fp8_count) * shard.element_size())

    def _plain_values(self, message: torch.Tensor, rank: int, shard: torch.Tensor) -> torch.Tensor:
        """The values of a message that are not in FP8."""
        first, count = aligned(self._fp8_counts[rank]), self._shard_size - self._fp8_counts[rank]
        return message[first : first + count * shard.element_size()].view(shard.dtype)

    def _count(self, shard: torch.Tensor, size: int, amax_bytes: int) -> None:
        count = self._fp8_counts[self._rank]
        plain = (self._shard_size - count) * shard.element_size()
        sent = {_GATHER: size - plain, "all_reduce": amax_bytes}
        count_encoded(NAME, self._ranks, count * shard.element_size(), sent, _GATHER)
        if plain:
            reason = ", ".join([NOT_FP8, *sorted(set(self.reasons.values()))])
            count_plain(NAME, self._ranks, plain, reason, _GATHER)

    def _unpack(
        self, messages: torch.Tensor, inverse_scales: torch.Tensor, shard: torch.Tensor, whole: torch.Tensor
    ) -> None:
        dtype = self._fp8[0].layer.fp8_config.weight_format
        plain = torch.cat([self._plain_values(message, rank, shard) for rank, message in enumerate(messages)]).split(
            [place.end - place.start for place in self._plain]
        )
        for place, values in zip(self._plain, plain, strict=True):
            whole[place.start : place.end].copy_(values)
        sizes = [place.end - place.start for place in self._fp8]
        fp8 = torch.cat([message[:count] for message, count in zip(messages, self._fp8_counts, strict=True)])
        matrices = [
            values.view(place.shape) for place, values in zip(self._fp8, fp8.view(dtype).split(sizes), strict=True)
        ]
        stored: list[QuantizedMatrix] = []
        for group in self._groups:
            data, inverse_scale = stack_rows(matrices[group.weights]), inverse_scales[group.weights.start]
            transpose = data.new_empty(data.shape[::-1])
            if group.source is not None:
                group.source.held = QuantizedMatrix(data, transpose, inverse_scale, None)
            rows = [place.shape[0] for place in self._fp8[group.weights]]
            for part, of_part in zip(data.split(rows), transpose.split(rows, 1), strict=True):
                stored.append(QuantizedMatrix(part, of_part, inverse_scale, None))
        parts, transposes, of_parts, _ = zip(*stored, strict=True)
        unpack(parts, of_parts, transposes, [whole[each.start : each.end].view(each.shape) for each in self._fp8])
        for place, each in zip(self._fp8, stored, strict=True):
            cast(ReshardedWeight, place.layer.fp8_weight).held = place.layer.in_product_layout(each)

    def drop(self) -> None:
        """Take the FP8 weights back from the layers, so that their memory can be given out again."""
        for place in self._fp8:
            gathered = place.layer.fp8_weight.held
            if gathered is not None and gathered.data.is_cuda:  # made on the stream that gathers
                stream = torch.cuda.current_stream(gathered.data.device)
                for tensor in gathered[:3]:
                    tensor.record_stream(stream)
            place.layer.fp8_weight.forget()
        for group in self._groups:
            if group.source is not None:
                group.source.forget()  # of the same memory

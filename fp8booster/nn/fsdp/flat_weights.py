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

import torch
import torch.distributed as dist
from torch.distributed.fsdp._flat_param import FlatParameter

from fp8booster import formats
from fp8booster.comm.observer import observer
from fp8booster.comm.transport import gather_bytes, new_message
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.experts.fp8_experts import why_not_in
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.sharding import NOT_FP8, ShardedCast, scale_groups, why_not_cast
from fp8booster.nn.weights.holder import WeightHolder, weight_holders
from fp8booster.tensor import QuantizedMatrix

NAME = "parameter gather"
"""The row of `fp8booster.comm.statistics`: a call for each unit that is gathered."""

_GATHER = "all_gather_into_tensor"


@dataclass(frozen=True)
class Place:
    """Values of the flat parameter that belong together."""

    start: int
    end: int

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the part that lies in a range, counted from the range's start; empty where nothing does."""
        first, last = max(self.start, start), min(self.end, end)
        return (first - start, last - start) if first < last else (0, 0)


@dataclass(frozen=True)
class FP8Place(Place):
    """Those of a weight that is gathered in FP8."""

    layer: WeightHolder
    shape: torch.Size


class FlatWeights:
    """The parameters of a unit that are gathered in FP8, and the others, as they lie in its messages.

    Args:
        flat_param: of the unit.
        rank, ranks: of the group that it is sharded over.
        merged: layers of the unit that are multiplied as one, or one by one where their weights cannot be stacked.
        dtype: that the unit computes in besides.
    """

    def __init__(
        self,
        flat_param: FlatParameter,
        rank: int,
        ranks: int,
        merged: Sequence[MergedLayers] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._rank, self._ranks, self._dtype = rank, ranks, dtype
        self._shard_size = flat_param._sharded_size.numel()
        self.reasons: dict[str, str] = {}
        """The reason why a weight of an FP8 layer is gathered in 16 bits, by its name in the unit."""

        # by place, in which all messages put one after the other are the whole weights
        fp8 = sorted(self._chosen(flat_param), key=lambda place: place.start)
        self._fp8 = fp8
        self._groups = scale_groups([place.layer for place in fp8], merged, self._why_apart)
        self._sharded: ShardedCast | None = None  # made where the unit is gathered
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
            layer = weight_holders(info.module).get(info.param_name)
            if layer is None:
                continue
            readers = 1 + ((info.module, info.param_name) in shared)
            of_engine = why_not_in(self._dtype, layer)
            reason = why_not_cast(layer, readers=readers, shape=shape[-2:], of_engine=of_engine)
            if reason is None and (not contiguous or extension is not None):
                reason = "not contiguous"
            elif reason is None and config is not None and layer.fp8_config != config:
                reason = "another FP8Config in the unit"
            if reason is None:
                config = layer.fp8_config
                yield FP8Place(start, end, layer, shape)
            else:
                self.reasons[f"{info.module_name}.{info.param_name}"] = reason

    def _why_apart(self, merged: MergedLayers) -> str | None:
        layers = [place.layer for place in self._fp8]
        first = layers.index(merged.layers[0])
        together = layers[first : first + len(merged.layers)] == list(merged.layers)
        return None if together else "the weights do not lie side by side in FP8"

    def uncompressed_reason(self, shard: torch.Tensor) -> str | None:
        """Return why nothing of the unit is gathered in FP8, or None where something is."""
        if self._ranks == 1:
            return "one rank"
        if not self._fp8:
            return ", ".join(sorted(set(self.reasons.values()))) or NOT_FP8
        if shard.dtype not in formats.HIGH_PRECISION:
            return str(shard.dtype).removeprefix("torch.")
        return None

    def _ranges(self, places: Sequence[Place], rank: int) -> list[tuple[int, int]]:
        """Return begin and end, within a rank's shard, of each place; both 0 where it holds nothing of it."""
        start = rank * self._shard_size
        return [place.within(start, start + self._shard_size) for place in places]

    @cached_property
    def _fp8_counts(self) -> list[int]:
        """The number of FP8 values in each rank's message."""
        return [sum(end - start for start, end in self._ranges(self._fp8, rank)) for rank in range(self._ranks)]

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
        # a gather sends as much of every rank, and ranks differ in how much of theirs is FP8
        size = max(self._message_size(count, shard) for count in self._fp8_counts)
        message = new_message(shard, size * self._ranks)
        own = message[self._rank * size : (self._rank + 1) * size]

        if self._sharded is None or self._sharded.device != shard.device:
            self._sharded = ShardedCast(self._groups, shard.device)
        amaxes = self._sharded.agree(fp8_parts, group)
        # memory of their own at each gather: what was gathered before may still be read
        scales = new_inverse_scales(len(self._groups), shard.device).unbind()
        of_weights = [scale for each, scale in zip(self._groups, scales, strict=True) for _ in each.layers]
        values = own[: self._fp8_counts[self._rank]].view(config.weight_format)
        self._sharded.cast(fp8_parts, amaxes, values.split([part.numel() for part in fp8_parts]), of_weights)
        if any(part.numel() for part in plain_parts):
            self._plain_values(own, self._rank, shard).copy_(torch.cat(plain_parts))
        self._count(shard, size, amaxes.nbytes)
        gather_bytes(message, own, group)
        self._unpack(message.view(self._ranks, size), scales, shard, whole)

    def _message_size(self, fp8_count: int, shard: torch.Tensor) -> int:
        return aligned(aligned(fp8_count) + (self._shard_size - fp8_count) * shard.element_size())

    def _plain_values(self, message: torch.Tensor, rank: int, shard: torch.Tensor) -> torch.Tensor:
        """Return the values of a message that are not in FP8."""
        first, count = aligned(self._fp8_counts[rank]), self._shard_size - self._fp8_counts[rank]
        return message[first : first + count * shard.element_size()].view(shard.dtype)

    def _count(self, shard: torch.Tensor, size: int, amax_bytes: int) -> None:
        count = self._fp8_counts[self._rank]
        plain = (self._shard_size - count) * shard.element_size()
        sent = {_GATHER: size - plain, "all_reduce": amax_bytes}
        observer.count_encoded(NAME, self._ranks, count * shard.element_size(), sent, _GATHER)
        if plain:
            reason = ", ".join([NOT_FP8, *sorted(set(self.reasons.values()))])
            observer.count_plain(NAME, self._ranks, plain, reason, _GATHER)

    def _unpack(
        self, messages: torch.Tensor, scales: Sequence[torch.Tensor], shard: torch.Tensor, whole: torch.Tensor
    ) -> None:
        dtype = self._fp8[0].layer.fp8_config.weight_format
        plain = torch.cat([self._plain_values(message, rank, shard) for rank, message in enumerate(messages)]).split(
            [place.end - place.start for place in self._plain]
        )
        for place, values in zip(self._plain, plain, strict=True):
            whole[place.start : place.end].copy_(values)
        # parts of a weight lie in the messages of neighbouring ranks; a copy makes them whole
        fp8 = torch.cat([message[:count] for message, count in zip(messages, self._fp8_counts, strict=True)]).view(
            dtype
        )
        places: dict[WeightHolder, FP8Place] = {place.layer: place for place in self._fp8}
        sizes = [sum(places[layer].shape.numel() for layer in group.layers) for group in self._groups]
        for group, values, scale in zip(self._groups, fp8.split(sizes), scales, strict=True):
            data = values.view(-1, places[group.layers[0]].shape[-1])
            # with a transpose: `unpack` writes both layouts and the 16-bit values in one pass over the bytes
            group.lie_in(QuantizedMatrix(data, data.new_empty(data.shape[::-1]), scale, None))
        data, transposes, inverse_scales, _ = zip(
            *(part for group in self._groups for part in group.parts), strict=True
        )
        kept = [whole[place.start : place.end].view(-1, place.shape[-1]) for place in self._fp8]
        unpack(data, inverse_scales, transposes, kept)
        for group in self._groups:
            group.fill()

    def drop(self) -> None:
        """Take the FP8 weights back from the layers, so that their memory can be given out again."""
        for group in self._groups:
            for part in group.parts:
                if part.data.is_cuda:  # made on the stream that gathers
                    stream = torch.cuda.current_stream(part.data.device)
                    for tensor in part[:3]:
                        tensor.record_stream(stream)
            group.forget()

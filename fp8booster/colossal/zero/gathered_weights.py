"""The weights of FP8 layers, gathered in FP8 after the optimizer's step.

Each rank's shard of the FP32 master is cast by the scale of the whole weight, and the bytes that are gathered are what
the layer multiplies by: no 16-bit gather, no second rounding. The 16-bit working weight becomes the value of these
bytes, so that whatever reads it sees the weight that the products used; a checkpoint gathers the masters themselves.

With `FP8Config.weights_in_16_bits` off a working weight has no memory between steps. Then nothing but the layers reads
what is gathered, and the layers wait for it by themselves: it is sent on a stream of its own, during the next forward.

Shards are those that LowLevelZeroOptimizer makes (_create_master_param_current_rank, low_level_optim.py:262), and the
padded size of a weight is kept in its `_working_param_to_padded_working_param` (:176).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster.colossal.in_16_bits import count_readers, uncompressed_reason
from fp8booster.comm.amax import agree_on_amax, largest_of_each
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.transport import gather_many
from fp8booster.kernels.shard_cast import cast_shards, unpack
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.layer import FP8Layer, restore_weight
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.memory import fits, without_large_copies
from fp8booster.nn.weights.stacking import are_stacked, stacked_columns, stacked_view
from fp8booster.tensor import QuantizedMatrix

NAME = "weight gather"
"""The row of `fp8booster.comm.statistics`: a call for each weight and group that it is gathered over."""

_GATHER = "all_gather_into_tensor"

BATCH_BYTES = 2**28
"""FP8 weights that are gathered at once. NCCL sends few large messages faster than many small ones: among 4 H200 what
stands for 64 MiB of BF16 at 435 GB/s of BF16's bytes, for 512 MiB at 559 ("not decoded" in
benchmarks/results/h200/collectives-4-one-sided)."""


class _Filled(NamedTuple):
    """A source, and what it is filled with."""

    holder: FP8Layer | MergedLayers
    source: EngineWeight
    weights: list[nn.Parameter]
    quantized: QuantizedMatrix


@dataclass(eq=False)
class ScaleGroup:
    """Weights under one scale: those of layers that are multiplied as one, stacked by rows, or a lone one."""

    filled: list[_Filled]
    """The source of each weight, and behind them that of all."""

    @property
    def weights(self) -> list[nn.Parameter]:
        """Those that share the scale."""
        return self.filled[-1].weights

    def fill(self, ready: torch.cuda.Event | None = None) -> None:
        """Hand the layers what was gathered; `ready` as in `EngineWeight.fill`."""
        for holder, source, weights, quantized in self.filled:
            if holder.fp8_weight is not source:  # converted again since
                holder.fp8_weight = source
            source.fill(weights, quantized, ready)


@dataclass
class GatheredWeight:
    """One weight: the layer that multiplies by it, and the memory that its FP8 copy lives in."""

    layer: FP8Layer
    group: ScaleGroup
    flat: torch.Tensor
    """[shard size * ranks] FP8: the gathered shards, of which the first numel are the weight."""

    quantized: QuantizedMatrix

    released: bool = False
    """The weight has no values in 16 bits now."""

    _parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def parts(self, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(a rank's shard, FP8; all shards and its own as bytes, as they are gathered); views made once."""
        if self._parts is None:
            own = self.flat.chunk(ranks)[rank]
            self._parts = own, self.flat.view(torch.uint8), own.view(torch.uint8)
        return self._parts


class _Batch(NamedTuple):
    """Weights on their way."""

    weights: list[GatheredWeight]
    works: list[dist.Work]


def _keeps_transpose(layer: FP8Layer) -> bool:
    """Whether a layer's FP8 weight lies in memory in both layouts between steps."""
    # one that lies transposed is multiplied in forward by what is not gathered
    return layer.fp8_config.keeps_transposes or layer.weight_is_transposed


def _stacked(layers: Sequence[FP8Layer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the FP8 weights of layers, stacked by rows, [N, K], and for their transpose, [K, N] or empty."""
    first, dtype = layers[0].weight, layers[0].fp8_config.weight_format
    columns, rows = first.shape[1], sum(len(layer.weight) for layer in layers)
    kept = _keeps_transpose(layers[0])
    return (first.new_empty((rows, columns), dtype=dtype), first.new_empty((columns, rows) if kept else 0, dtype=dtype))


def _parts(
    data: torch.Tensor, transpose: torch.Tensor, weights: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What `_stacked` gave, as the rows and the columns of each weight."""
    rows = [len(weight) for weight in weights]
    transposes = transpose.split(rows, 1) if transpose.dim() == 2 else [transpose] * len(rows)
    return list(zip(data.split(rows), transposes, strict=True))


class GatheredWeights:
    """The weights of a model that are sent in FP8.

    Args:
        model: converted to FP8 layers.
        optimizer: the ZeRO optimizer over its parameters.
    """

    def __init__(self, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._weights: dict[nn.Parameter, GatheredWeight] = {}
        self._reasons: dict[nn.Parameter, str] = {}
        masters, readers = optimizer.get_working_to_master_map(), count_readers(model)
        for by_stage in getattr(optimizer, "shared_params", ()):
            readers.update(by_stage.values())  # other pipeline stages hold it too
        layers = {
            module.weight: module
            for module in model.modules()
            if isinstance(module, FP8Layer) and id(module.weight) in masters
        }
        copies_fit = fits(model, bytes_a_value=2)
        for weight, layer in layers.items():
            two_groups = isinstance(optimizer.param_to_pg[weight], tuple)
            reason = uncompressed_reason(
                layer,
                master_weights=optimizer._master_weights,
                readers=readers[weight],
                of_engine="extra_dp_size" if two_groups else None,
            )
            if reason is None:
                layer.fp8_config = without_large_copies(layer.fp8_config, copies_fit)
            else:
                self._reasons[weight] = reason
        for module in model.modules():
            if isinstance(module, FP8Experts):
                reason = "experts held as one parameter"
                self._reasons.update((getattr(module, name), reason) for name in module.fp8_weights)
        self._first_of_scale: dict[tuple[nn.Parameter, ...], torch.Tensor] = {}
        sent = {weight: layer for weight, layer in layers.items() if weight not in self._reasons}
        self._buffers = self._buffers_of_experts(model, sent)
        for merged in merged_layers(model):
            gathered = [weight in sent for weight in merged.weights]
            if all(gathered) and self._can_lie_together(merged):
                self._allocate_together(merged)
            elif any(gathered):  # else each step casts all of them together
                merged.fp8_weight.refusal = "the weights are not gathered into one matrix"
        for weight, layer in sent.items():
            if weight not in self._weights:
                self._weights[weight] = self._allocate(layer)
        self._ready: torch.cuda.Event | None = None
        self._read_beside: tuple[Mapping[nn.Parameter, torch.Tensor], ...] | None = None
        alone = [each for each in self._weights.values() if not each.layer.fp8_config.keeps_16_bits]
        for gathered in alone:
            gathered.layer.register_state_dict_pre_hook(restore_weight)
            gathered.layer.register_load_state_dict_pre_hook(restore_weight)
        beside = len(alone) == len(self._weights) > 0 and alone[0].flat.is_cuda
        self._stream = torch.cuda.Stream(alone[0].flat.device) if beside else None

    def __contains__(self, working: nn.Parameter) -> bool:
        return working in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def count_in_16_bits(self, working: nn.Parameter, shard: torch.Tensor) -> None:
        """Count a gather of a working weight in 16 bits, with its reason, for `fp8booster.comm.statistics`."""
        groups = self._optimizer.param_to_pg[working]
        reason = "for a checkpoint" if working in self else "not the weight of an FP8 layer"
        payload = shard.nbytes
        for group in reversed(groups if isinstance(groups, tuple) else (groups,)):
            ranks = dist.get_world_size(group)
            count_plain(NAME, ranks, payload, self._reasons.get(working, reason), _GATHER)
            payload *= ranks

    def _buffers_of_experts(
        self, model: nn.Module, sent: Mapping[nn.Parameter, FP8Layer]
    ) -> dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor]]:
        """Memory for weights that grouped products read as one, stacked by rows.

        Args:
            model: whose experts they are.
            sent: the layer of each weight that is gathered in FP8.

        Returns:
            by weight, its FP8 values [N, K] and their transpose [K, N], or an empty tensor.
        """
        buffers = {}
        for experts in grouped_experts(model):
            for layers in experts.products():
                weights = [layer.weight for layer in layers]
                if all(weight in sent and not self._is_padded(weight) for weight in weights):
                    buffers.update(zip(weights, _parts(*_stacked(layers), weights), strict=True))
        return buffers

    def _is_padded(self, weight: nn.Parameter) -> bool:
        """Whether a weight's shards hold more than the weight."""
        return self._optimizer._working_param_to_padded_working_param[weight].numel() != weight.numel()

    def _allocate(self, layer: FP8Layer) -> GatheredWeight:
        weight, dtype = layer.weight, layer.fp8_config.weight_format
        buffer = self._buffers.get(weight)
        if buffer is None:
            flat = weight.new_empty(self._optimizer._working_param_to_padded_working_param[weight].numel(), dtype=dtype)
            data = flat[: weight.numel()].view(weight.shape)
            transpose = weight.new_empty(weight.shape[::-1] if _keeps_transpose(layer) else 0, dtype=dtype)
        else:
            data, transpose = buffer
            flat = data.view(-1)
        inverse_scale = weight.new_empty((), dtype=torch.float32)
        quantized = QuantizedMatrix(data, transpose, inverse_scale, None)
        return GatheredWeight(layer, ScaleGroup([self._fill_later(layer, quantized)]), flat, quantized)

    def _fill_later(self, layer: FP8Layer, quantized: QuantizedMatrix) -> _Filled:
        """Let a layer take its FP8 weight from here."""
        restore = None if layer.fp8_config.keeps_16_bits else self.restore
        layer.fp8_weight = EngineWeight(layer.weight_is_transposed, restore)
        return _Filled(layer, layer.fp8_weight, [layer.weight], layer.in_product_layout(quantized))

    def _can_lie_together(self, merged: MergedLayers) -> bool:
        """Whether weights that are multiplied as one can be gathered into one matrix, under one scale."""
        return (
            len({self._optimizer.param_to_pg[weight] for weight in merged.weights}) == 1
            and len({layer.fp8_config for layer in merged.layers}) == 1
            and not any(map(self._is_padded, merged.weights))
        )

    def _allocate_together(self, merged: MergedLayers) -> None:
        """Memory for weights stacked by rows, of which each layer's FP8 weight is a part."""
        weights = merged.weights
        data, transpose = self._buffer_of(merged) or _stacked(merged.layers)
        inverse_scale = weights[0].new_empty((), dtype=torch.float32)
        parts = _parts(data, transpose, weights)
        group = ScaleGroup([])
        for layer, (part, transposed) in zip(merged.layers, parts, strict=True):
            quantized = QuantizedMatrix(part, transposed, inverse_scale, None)
            group.filled.append(self._fill_later(layer, quantized))
            self._weights[layer.weight] = GatheredWeight(layer, group, part.view(-1), quantized)
        merged.fp8_weight = EngineWeight()
        whole = QuantizedMatrix(data, transpose, inverse_scale, None)
        group.filled.append(_Filled(merged, merged.fp8_weight, weights, whole))

    def _buffer_of(self, merged: MergedLayers) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Memory for merged weights within that of experts, if it lies so there."""
        buffers = [self._buffers.get(weight) for weight in merged.weights]
        if None in buffers:
            return None
        parts, transposes = zip(*buffers, strict=True)
        if not are_stacked(parts):
            return None
        whole = transposes[0] if transposes[0].dim() == 1 else stacked_columns(transposes)
        return None if whole is None else (stacked_view(parts), whole)

    @torch.no_grad()
    def publish(
        self, masters: Mapping[nn.Parameter, torch.Tensor], amaxes: Mapping[nn.Parameter, torch.Tensor]
    ) -> None:
        """Cast, gather and hand to the layers the weights of this step.

        Args:
            masters: this rank's shard of each updated weight, on the weight's device.
            amaxes: of the shards whose amax is known already: float32 [], on the weight's device.
        """
        masters = self._with_scale_groups(masters)
        by_group: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for working in masters:
            by_group.setdefault(self._optimizer.param_to_pg[working], []).append(working)
        with self._beside():
            for group, parameters in by_group.items():
                self._publish(parameters, masters, amaxes, group)
        if self._stream is not None:
            # so that the allocator gives their memory to nobody before `wait`
            self._read_beside = masters, amaxes

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a stream of its own where nothing but the layers, which wait, reads the weights."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Make the current stream wait for the weights of the last step."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._read_beside = None

    def _with_scale_groups(self, masters: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """The updated weights, and those that share a scale with one of them."""
        all_masters = dict(masters)
        for working, master in masters.items():
            for weight in self._weights[working].group.weights:
                if weight not in all_masters:
                    other = self._optimizer.working_to_master_param[id(weight)]
                    all_masters[weight] = other.to(master.device)
        return all_masters

    def _publish(
        self,
        parameters: list[nn.Parameter],
        masters: Mapping[nn.Parameter, torch.Tensor],
        known: Mapping[nn.Parameter, torch.Tensor],
        group: dist.ProcessGroup,
    ) -> None:
        """Cast, gather and unpack batch by batch: while one is sent, the next is cast and the last is unpacked."""
        batches = list(self._batches(parameters))
        under_way: _Batch | None = None
        amaxes = self._agree(batches[0], masters, known, group)
        for batch, following in zip_longest(batches, batches[1:]):
            messages = self._cast(batch, masters, amaxes, group)
            if following is not None:
                # first: it would wait for what is under way
                amaxes = self._agree(following, masters, known, group)
            leaving = _Batch(batch, gather_many(messages, group))
            if under_way is not None:
                self._unpack(under_way)
            under_way = leaving
        self._unpack(under_way)

    def _batches(self, parameters: list[nn.Parameter]) -> Iterator[list[GatheredWeight]]:
        """The weights, in batches of about `BATCH_BYTES`; those that share a scale are in one."""
        batch, size, taken = [], 0, set()
        for parameter in parameters:
            if parameter in taken:
                continue
            for weight in self._weights[parameter].group.weights:
                taken.add(weight)
                gathered = self._weights[weight]
                batch.append(gathered)
                size += gathered.flat.nbytes
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _agree(
        self,
        batch: list[GatheredWeight],
        masters: Mapping[nn.Parameter, torch.Tensor],
        known: Mapping[nn.Parameter, torch.Tensor],
        group: dist.ProcessGroup,
    ) -> Sequence[torch.Tensor]:
        """The amax that each weight is cast by, float32 []."""
        weights, rank = [gathered.layer.weight for gathered in batch], dist.get_rank(group)
        # without the padding of the last shard, of which an optimizer may make anything
        values = [masters[each][: max(0, each.numel() - rank * masters[each].numel())] for each in weights]
        amaxes = agree_on_amax(values, group, [known.get(weight) for weight in weights])
        return largest_of_each(amaxes, self._firsts_of_scale(weights)).unbind()

    def _firsts_of_scale(self, weights: list[nn.Parameter]) -> torch.Tensor:
        """For each weight the place of the first one that it shares a scale with: int64 [len(weights)]."""
        key = tuple(weights)
        if key not in self._first_of_scale:
            groups = [self._weights[weight].group for weight in weights]
            firsts = [groups.index(group) for group in groups]
            self._first_of_scale[key] = torch.tensor(firsts, device=weights[0].device)
        return self._first_of_scale[key]

    def _cast(
        self,
        batch: list[GatheredWeight],
        masters: Mapping[nn.Parameter, torch.Tensor],
        amaxes: Sequence[torch.Tensor],
        group: dist.ProcessGroup,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cast this rank's shards; what is to be gathered, and its own part, as bytes."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        shards = [masters[gathered.layer.weight] for gathered in batch]
        outs, *messages = zip(*[gathered.parts(ranks, rank) for gathered in batch], strict=True)
        inverse_scales = [gathered.quantized.inverse_scale for gathered in batch]
        for power_of_two in (False, True):
            alike = [place for place, each in enumerate(batch) if each.layer.fp8_config.power_of_two is power_of_two]
            if alike:
                columns = ([column[place] for place in alike] for column in (shards, amaxes, outs, inverse_scales))
                cast_shards(*columns, power_of_two)
        for gathered, shard, amax, out in zip(batch, shards, amaxes, outs, strict=True):
            weight = gathered.layer.weight
            values = max(0, weight.numel() - rank * shard.numel())  # without the padding of the last shard
            gathered.layer.fp8_casts.note_weight(shard[:values], out[:values], gathered.quantized.inverse_scale)
            sent = {_GATHER: out.nbytes, "all_reduce": amax.nbytes}
            count_encoded(NAME, ranks, shard.numel() * weight.element_size(), sent, _GATHER)
        return list(zip(*messages, strict=True))

    def _unpack(self, batch: _Batch) -> None:
        for work in batch.works:
            work.wait()
        self._hand_over(batch.weights)
        if self._stream is not None:
            self._ready = self._stream.record_event()
        # each as soon as it is there: layers must not wait for later batches
        for group in dict.fromkeys(gathered.group for gathered in batch.weights):
            group.fill(self._ready)

    def _hand_over(self, batch: list[GatheredWeight]) -> None:
        """Make of the gathered bytes what else is read."""
        quantized, weights = [each.quantized for each in batch], [each.layer.weight for each in batch]
        unpack(
            [each.data for each in quantized],
            [each.inverse_scale for each in quantized],
            [each.quantized.transpose if _keeps_transpose(each.layer) else None for each in batch],
            [each.layer.weight.data if each.layer.fp8_config.keeps_16_bits else None for each in batch],
        )
        for each in batch:
            if not each.layer.fp8_config.keeps_16_bits:
                self._release(each)
        # a graph that still holds the former values must not go backward with these
        written = [tensor for each in quantized for tensor in each[:3]]
        torch.autograd.graph.increment_version([*written, *weights])

    def _release(self, gathered: GatheredWeight) -> None:
        """Give back the memory of a weight in 16 bits; what reads it sees NaN."""
        weight = gathered.layer.weight
        weight.data = weight.new_full((), torch.nan).expand(weight.shape)
        self._optimizer._working_param_to_padded_working_param[weight] = weight.new_empty(0)
        gathered.released = True

    def restore(self) -> None:
        """Give every weight its value in 16 bits again, until the next step, for what reads parameters."""
        self.wait()
        for gathered in self._weights.values():
            self._restore(gathered)

    @torch.no_grad()
    def _restore(self, gathered: GatheredWeight) -> None:
        if not gathered.released:
            return
        weight, quantized = gathered.layer.weight, gathered.quantized
        padded = weight.new_zeros(gathered.flat.numel())
        values = padded[: weight.numel()].view(weight.shape)
        unpack([quantized.data], [quantized.inverse_scale], [None], [values])
        weight.data = values
        self._optimizer._working_param_to_padded_working_param[weight] = padded
        gathered.released = False
        gathered.group.fill()

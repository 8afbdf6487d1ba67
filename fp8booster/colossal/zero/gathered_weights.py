"""The weights of FP8 layers, gathered in FP8 after the optimizer's step.

Each rank's shard of the FP32 master is cast by the scale of the whole weight, and the bytes that are gathered are what
the layer multiplies by: no 16-bit gather, no second rounding. The 16-bit working weight becomes the value of these
bytes, so that whatever reads it sees the weight that the products used; a checkpoint gathers the masters themselves.

With `FP8Config.weights_in_16_bits` off a working weight has no memory between steps. Then nothing but the layers reads
what is gathered, and the layers wait for it by themselves: it is sent on a stream of its own, during the next forward.
A weight that somebody reads without its layer, as Mamba does, gets its values when it is read first, and keeps them.

Shards are those that LowLevelZeroOptimizer makes (_create_master_param_current_rank, low_level_optim.py:262), and the
padded size of a weight is kept in its `_working_param_to_padded_working_param` (:176).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster.colossal.in_16_bits import count_readers, uncompressed_reason
from fp8booster.colossal.zero.weight_batch import (
    GATHER,
    NAME,
    Filled,
    GatheredWeight,
    ScaleGroup,
    Sent,
    WeightBatch,
    keeps_transpose,
)
from fp8booster.comm.amax import agree_on_amax, largest_of_each
from fp8booster.comm.statistics import count_plain
from fp8booster.comm.threshold import ranks_of
from fp8booster.comm.transport import gather_many
from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.layer import FP8Layer, restore_weight
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.memory import fits, without_large_copies
from fp8booster.nn.weights.stacking import are_stacked, stacked_columns, stacked_view
from fp8booster.tensor import QuantizedMatrix

BATCH_BYTES = 2**28
"""FP8 weights that are gathered at once. NCCL sends few large messages faster than many small ones: among 4 H200 what
stands for 64 MiB of BF16 at 435 GB/s of BF16's bytes, for 512 MiB at 559 ("not decoded" in
benchmarks/results/h200/collectives-4-one-sided)."""


@dataclass
class _Plan:
    """What is sent after a step that updates certain weights."""

    updated: list[GatheredWeight]
    """These, in the order in which they are given."""

    others: list[GatheredWeight]
    """Those that share a scale with one of them."""

    batches: list[tuple[dist.ProcessGroup, list[tuple[WeightBatch, list[int]]]]]
    """With the places of a batch's weights among the updated ones and the others behind them."""


def _stacked(layers: Sequence[FP8Layer]) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the FP8 weights of layers, stacked by rows, [N, K], and for their transpose, [K, N] or empty."""
    first, dtype = layers[0].held_weight, layers[0].fp8_config.weight_format
    columns, rows = first.shape[1], sum(len(layer.held_weight) for layer in layers)
    kept = keeps_transpose(layers[0])
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
            weight: module
            for module in model.modules()
            if isinstance(module, FP8Layer) and id(weight := module._parameters.get("weight")) in masters
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
        self._plan: _Plan | None = None  # of the last step
        self._ready: torch.cuda.Event | None = None
        self._read_beside: tuple[Sequence[torch.Tensor | None], ...] | None = None
        alone = [each for each in self._weights.values() if not each.keeps_16_bits]
        for gathered in alone:
            gathered.layer.register_state_dict_pre_hook(restore_weight)
            gathered.layer.register_load_state_dict_pre_hook(restore_weight)
        beside = len(alone) == len(self._weights) > 0 and alone[0].flat.is_cuda
        self._stream = torch.cuda.Stream(alone[0].flat.device) if beside else None

    def of(self, working: nn.Parameter) -> GatheredWeight | None:
        """What a working weight is sent as; None: it is sent in 16 bits."""
        return self._weights.get(working)

    def __contains__(self, working: nn.Parameter) -> bool:
        return working in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def count_in_16_bits(self, working: Sequence[nn.Parameter], shards: Sequence[torch.Tensor]) -> None:
        """Count gathers of working weights in 16 bits, with their reasons, for `fp8booster.comm.statistics`.

        Args:
            working: the weights, in the order of `shards`.
            shards: what this rank sends of each.
        """
        calls: Counter[tuple[int, str]] = Counter()
        payloads: Counter[tuple[int, str]] = Counter()
        for weight, shard in zip(working, shards, strict=True):
            groups, payload = self._optimizer.param_to_pg[weight], shard.nbytes
            reason = self._reasons.get(weight) or (
                "for a checkpoint" if weight in self else "not the weight of an FP8 layer"
            )
            for group in reversed(groups) if isinstance(groups, tuple) else (groups,):
                ranks = ranks_of(group)
                calls[ranks, reason] += 1
                payloads[ranks, reason] += payload
                payload *= ranks
        for (ranks, reason), count in calls.items():
            count_plain(NAME, ranks, payloads[ranks, reason], reason, GATHER, calls=count)

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
                weights = [layer.held_weight for layer in layers]
                if all(weight in sent and not self._is_padded(weight) for weight in weights):
                    buffers.update(zip(weights, _parts(*_stacked(layers), weights), strict=True))
        return buffers

    def _is_padded(self, weight: nn.Parameter) -> bool:
        """Whether a weight's shards hold more than the weight."""
        return self._optimizer._working_param_to_padded_working_param[weight].numel() != weight.numel()

    def _allocate(self, layer: FP8Layer) -> GatheredWeight:
        weight, dtype = layer.held_weight, layer.fp8_config.weight_format
        buffer = self._buffers.get(weight)
        if buffer is None:
            flat = weight.new_empty(self._optimizer._working_param_to_padded_working_param[weight].numel(), dtype=dtype)
            data = flat[: weight.numel()].view(weight.shape)
            transpose = weight.new_empty(weight.shape[::-1] if keeps_transpose(layer) else 0, dtype=dtype)
        else:
            data, transpose = buffer
            flat = data.view(-1)
        inverse_scale = weight.new_empty((), dtype=torch.float32)
        quantized = QuantizedMatrix(data, transpose, inverse_scale, None)
        return GatheredWeight(layer, ScaleGroup([self._fill_later(layer, quantized)]), flat, quantized)

    def _fill_later(self, layer: FP8Layer, quantized: QuantizedMatrix) -> Filled:
        """Let a layer take its FP8 weight from here."""
        if layer.fp8_config.keeps_16_bits:
            layer.fp8_weight = EngineWeight(layer.weight_is_transposed)
        else:
            keep = partial(self._keep, layer.held_weight)
            layer.fp8_weight = EngineWeight(layer.weight_is_transposed, self.restore, keep)
        return Filled(layer, layer.fp8_weight, [layer.held_weight], layer.in_product_layout(quantized))

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
            self._weights[layer.held_weight] = GatheredWeight(layer, group, part.view(-1), quantized)
        merged.fp8_weight = EngineWeight()
        whole = QuantizedMatrix(data, transpose, inverse_scale, None)
        group.filled.append(Filled(merged, merged.fp8_weight, weights, whole))

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
    def publish(self, sent: Sequence[Sent]) -> None:
        """Cast, gather and hand to the layers the weights of this step."""
        updated = [each.weight for each in sent]
        if self._plan is None or self._plan.updated != updated:
            self._plan = self._planned(updated)
        shards, amaxes = [each.shard for each in sent], [each.amax for each in sent]
        for other in self._plan.others:
            weight = other.layer.held_weight
            shards.append(self._optimizer.working_to_master_param[id(weight)].to(weight.device))
            amaxes.append(None)
        with self._beside():
            for group, batches in self._plan.batches:
                self._publish([_Cast(batch, places, shards, amaxes) for batch, places in batches], group)
        if self._stream is not None:
            # so that the allocator gives their memory to nobody before `wait`
            self._read_beside = shards, amaxes

    def _planned(self, updated: list[GatheredWeight]) -> _Plan:
        """What is sent after a step that updates these weights."""
        sent = dict.fromkeys(updated)
        for each in updated:
            sent.update(dict.fromkeys(self._sharing_scale(each)))
        places = {each: place for place, each in enumerate(sent)}
        by_group: dict[dist.ProcessGroup, list[GatheredWeight]] = {}
        for each in sent:
            by_group.setdefault(self._optimizer.param_to_pg[each.layer.held_weight], []).append(each)
        batches = [
            (group, [(batch, [places[each] for each in batch.weights]) for batch in self._batches(weights, group)])
            for group, weights in by_group.items()
        ]
        return _Plan(updated, list(sent)[len(updated) :], batches)

    def _sharing_scale(self, gathered: GatheredWeight) -> list[GatheredWeight]:
        """The weights under one scale with this one, and itself."""
        return [self._weights[weight] for weight in gathered.group.weights]

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

    def _publish(self, casts: list[_Cast], group: dist.ProcessGroup) -> None:
        """Cast, gather and unpack batch by batch: while one is sent, the next is cast and the last is unpacked."""
        under_way: tuple[WeightBatch, list[dist.Work]] | None = None
        amaxes = casts[0].agreed(group)
        for cast, following in zip_longest(casts, casts[1:]):
            cast.batch.cast(cast.shards, amaxes)
            if following is not None:
                # first: it would wait for what is under way
                amaxes = following.agreed(group)
            leaving = cast.batch, gather_many(cast.batch.messages, group)
            if under_way is not None:
                self._unpack(*under_way)
            under_way = leaving
        if under_way is not None:
            self._unpack(*under_way)

    def _batches(self, weights: list[GatheredWeight], group: dist.ProcessGroup) -> Iterator[WeightBatch]:
        """The weights, in batches of about `BATCH_BYTES`; those that share a scale are in one."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        batch: list[GatheredWeight] = []
        taken: set[GatheredWeight] = set()
        for first in weights:
            if first in taken:
                continue
            of_scale = self._sharing_scale(first)
            taken.update(of_scale)
            batch += of_scale
            if sum(gathered.flat.nbytes for gathered in batch) >= BATCH_BYTES:
                yield WeightBatch(batch, ranks, rank)
                batch = []
        if batch:
            yield WeightBatch(batch, ranks, rank)

    def _unpack(self, batch: WeightBatch, works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
        self._hand_over(batch)
        if self._stream is not None:
            self._ready = self._stream.record_event()
        # each as soon as it is there: layers must not wait for later batches
        for group in batch.groups:
            group.fill(self._ready)

    def _hand_over(self, batch: WeightBatch) -> None:
        """Make of the gathered bytes what else is read."""
        unpack(
            [each.data for each in batch.quantized],
            batch.inverse_scales,
            batch.transposes,
            [
                weight if each.keeps_16_bits else None
                for weight, each in zip(batch.parameters, batch.weights, strict=True)
            ],
        )
        for each in batch.weights:
            if not each.keeps_16_bits:
                self._release(each)
        # a graph that still holds the former values must not go backward with these
        torch.autograd.graph.increment_version([*batch.written, *batch.parameters])

    def _release(self, gathered: GatheredWeight) -> None:
        """Give back the memory of a weight in 16 bits; who finds it among the parameters sees NaN."""
        weight = gathered.layer.held_weight
        weight.data = weight.new_full((), torch.nan).expand(weight.shape)
        self._optimizer._working_param_to_padded_working_param[weight] = weight.new_empty(0)
        gathered.released = True

    def restore(self) -> None:
        """Give every weight its value in 16 bits again, until the next step, for what reads parameters."""
        self.wait()
        for gathered in self._weights.values():
            self._restore(gathered)

    def _keep(self, weight: nn.Parameter) -> None:
        """Give a weight its value in 16 bits, after each step too."""
        self.wait()
        self._stream = self._ready = None  # what reads it does not wait
        gathered = self._weights[weight]
        gathered.keeps_16_bits = True
        with torch.inference_mode(False):  # autograd may save it later
            self._restore(gathered)

    @contextmanager
    def values_of_masters(self) -> Iterator[None]:
        """Let what is written to the weights inside, the masters' values in 16 bits, count as values of these weights.

        It does for layers that multiply by what was gathered. Where other weights were loaded since, also into the
        masters, what was gathered is of neither.
        """
        sources = [filled for group in self._groups() for filled in group.filled]
        written = {id(filled) for filled in sources if filled.is_right()}
        yield
        for filled in sources:
            if id(filled) in written:
                filled.source.note_values(filled.weights)
            else:
                filled.source.forget()

    def drop(self) -> None:
        """Let layers cast their weights until the next step: what was gathered is of other masters."""
        for group in self._groups():
            for filled in group.filled:
                filled.source.drop()

    def _groups(self) -> Iterator[ScaleGroup]:
        yield from dict.fromkeys(gathered.group for gathered in self._weights.values())

    @torch.no_grad()
    def _restore(self, gathered: GatheredWeight) -> None:
        if not gathered.released:
            return
        weight, quantized = gathered.layer.held_weight, gathered.quantized
        padded = weight.new_zeros(gathered.flat.numel())
        if any(weight.stride()):  # somebody gave it other data
            self._optimizer._working_param_to_padded_working_param[weight] = padded
            gathered.released = False
            return
        values = padded[: weight.numel()].view(weight.shape)
        unpack([quantized.data], [quantized.inverse_scale], [None], [values])
        right = [filled for filled in gathered.group.filled if filled.is_right()]  # others may have been given data
        weight.data = values
        self._optimizer._working_param_to_padded_working_param[weight] = padded
        gathered.released = False
        for filled in right:
            filled.fill()


class _Cast:
    """A batch, and what it is cast from in this step.

    Args:
        batch: what is cast.
        places: of its weights in the lists.
        shards, amaxes: as in `Sent`, of all batches.
    """

    def __init__(
        self,
        batch: WeightBatch,
        places: Sequence[int],
        shards: Sequence[torch.Tensor],
        amaxes: Sequence[torch.Tensor | None],
    ) -> None:
        self.batch, self.shards = batch, [shards[place] for place in places]
        self._known = [amaxes[place] for place in places]

    def agreed(self, group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
        """The amax that each weight is cast by, float32 []."""
        # without the padding of the last shard, of which an optimizer may make anything
        values = [
            shard[:count] if amax is None else shard
            for shard, count, amax in zip(self.shards, self.batch.counts, self._known, strict=True)
        ]
        return largest_of_each(agree_on_amax(values, group, self._known), self.batch.firsts).unbind()

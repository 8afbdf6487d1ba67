"""The weights of FP8 layers, gathered in FP8 after the optimizer's step.

Each rank's shard of the FP32 master is cast by the scale of the whole weight (`nn.sharding`), and the bytes that are
gathered are what the layer multiplies by. The 16-bit working weight becomes the value of these bytes, so that whatever
reads it sees the weight that the products used; a checkpoint gathers the masters themselves.

With `WeightCopies.high_precision` off a working weight has no memory between steps. Then nothing but the layers reads
what is gathered, and the layers wait for it by themselves: it is sent on a stream of its own, during the next forward.
A weight that somebody reads without its layer, as Mamba does, gets its values when it is read first, and keeps them.

Shards are those that LowLevelZeroOptimizer makes (_create_master_param_current_rank, low_level_optim.py:262), and the
padded size of a weight is kept in its `_working_param_to_padded_working_param` (:176).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from operator import attrgetter, eq
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn

from fp8booster.comm.observer import bytes_of_encoded, observer
from fp8booster.comm.threshold import ranks_of
from fp8booster.comm.transport import gather_many
from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.experts.fp8_experts import ExpertWeight, why_not_in
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import count_readers
from fp8booster.nn.sharding import NOT_FP8, Filled, ScaleGroup, ShardedCast, fill_layers, scale_groups, why_not_cast
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.holder import WeightHolder, restore_weights, weight_holders
from fp8booster.nn.weights.memory import fits
from fp8booster.tensor import QuantizedMatrix

NAME = "weight gather"
"""The row of `fp8booster.comm.statistics`: a call for each weight and group that it is gathered over."""

_GATHER = "all_gather_into_tensor"

BATCH_BYTES = 2**28
"""FP8 weights that are gathered at once. NCCL sends few large messages faster than many small ones: among 4 H200 what
stands for 64 MiB of BF16 at 435 GB/s of BF16's bytes, for 512 MiB at 559 ("not decoded" in
benchmarks/results/h200/collectives-4-one-sided)."""


Shard = tuple[torch.Tensor, torch.Tensor | None]
"""This rank's part of a weight's master, and its amax where that is known: float32 []. Both on the weight's device."""


@dataclass(eq=False)
class GatheredWeight:
    """One weight: the layer that multiplies by it, and the memory that its FP8 copy lives in."""

    layer: WeightHolder
    group: ScaleGroup
    quantized: QuantizedMatrix

    flat: torch.Tensor
    """[shard size * ranks] FP8: the gathered shards, of which the first numel are the weight."""

    keeps_16_bits: bool
    """The weight has values in 16 bits between steps: as the model was boosted, or as somebody multiplies by it without
    its layer."""

    released: bool = False
    """The weight has no values in 16 bits now."""


_SHAPE = attrgetter("shape")


class WeightBatch:
    """Weights that are gathered at once, and what of them is the same at every step.

    Args:
        weights: those that share a scale one after the other.
        ranks, rank: of the group over which they are gathered.
    """

    def __init__(self, weights: Sequence[GatheredWeight], ranks: int, rank: int) -> None:
        self.weights, self.groups = list(weights), list(dict.fromkeys(each.group for each in weights))
        self.parameters = [each.layer.held_weight for each in weights]
        self.matrices, self.transposes, self.inverse_scales, _ = map(
            list, zip(*(each.quantized for each in weights), strict=True)
        )
        self._are_matrices = list(map(eq, map(_SHAPE, self.parameters), map(_SHAPE, self.matrices)))
        self._wanted_transposes = [each if each.numel() else None for each in self.transposes]
        # views into what is gathered: the cast writes this rank's part of the message itself, which nobody copies then
        self._own = [each.flat.chunk(ranks)[rank] for each in weights]
        self.messages = [
            (each.flat.view(torch.uint8), own.view(torch.uint8)) for each, own in zip(weights, self._own, strict=True)
        ]
        """The bytes to gather of each weight, and this rank's part of them."""

        sizes = [(weight.numel(), own.numel()) for weight, own in zip(self.parameters, self._own, strict=True)]
        counts = [max(0, min(size, values - rank * size)) for values, size in sizes]
        self.sharded = ShardedCast(self.groups, self.parameters[0].device, counts)
        # sizes do not change, so the host adds bytes up once and not at each step
        sent = [
            bytes_of_encoded(
                _GATHER, ranks, size * weight.element_size(), ((_GATHER, size, ranks), ("all_reduce", 4, ranks))
            )
            for weight, (_, size) in zip(self.parameters, sizes, strict=True)
        ]
        self._bytes = [sum(column) for column in zip(*sent, strict=True)]

    def agree(self, given: Mapping[GatheredWeight, Shard], ranks: dist.ProcessGroup) -> torch.Tensor:
        """Return the amax that each weight is cast by, float32 [weights]."""
        values, amaxes = zip(*map(given.__getitem__, self.weights), strict=True)
        return self.sharded.agree(values, ranks, amaxes)

    def cast(self, given: Mapping[GatheredWeight, Shard], amaxes: torch.Tensor) -> None:
        """Cast this rank's shards of the master weights, into `messages`."""
        self.sharded.cast([given[each][0] for each in self.weights], amaxes, self._own, self.inverse_scales)
        observer.count(NAME, len(self.weights), *self._bytes)

    def unpack(self) -> None:
        """Make of the gathered bytes what else is read: transposes, and values in 16 bits."""
        # a view takes the host as long as ten looks
        kept = [
            None if not each.keeps_16_bits else weight if is_matrix else weight.view(matrix.shape)
            for each, weight, matrix, is_matrix in zip(
                self.weights, self.parameters, self.matrices, self._are_matrices, strict=True
            )
        ]
        unpack(self.matrices, self.inverse_scales, self._wanted_transposes, kept)
        # a graph that still holds the former values must not go backward with these
        torch.autograd.graph.increment_version(
            [*self.matrices, *self.transposes, *self.inverse_scales, *self.parameters]
        )


class _Plan(NamedTuple):
    """The weights that are sent after a step that updates certain weights."""

    updated: list[GatheredWeight]

    others: list[GatheredWeight]
    """Those that share a scale with one of them."""

    batches: list[tuple[dist.ProcessGroup, list[WeightBatch]]]


class GatheredWeights:
    """The weights of a model that are sent in FP8.

    Args:
        model: converted to FP8 layers.
        optimizer: the ZeRO optimizer over its parameters.
    """

    _counted: tuple[int, ...] | None = None
    """Ids of the weights that were counted last."""

    _counts: dict[tuple[int, str], tuple[int, int]]

    def __init__(self, model: nn.Module, optimizer: LowLevelZeroOptimizer) -> None:
        self._optimizer = optimizer
        self._weights: dict[nn.Parameter, GatheredWeight] = {}
        self._reasons: dict[nn.Parameter, str] = {}
        masters, readers = optimizer.get_working_to_master_map(), count_readers(model)
        for by_stage in getattr(optimizer, "shared_params", ()):
            readers.update(by_stage.values())  # other pipeline stages hold it too
        layers: list[WeightHolder] = []
        for module in model.modules():
            for name, layer in weight_holders(module).items():
                weight: Any = module._parameters.get(name)
                if id(weight) not in masters:
                    continue
                of_engine = self._why_not_cast(weight) or why_not_in(weight.dtype, layer)
                reason = why_not_cast(layer, readers=readers[weight], of_engine=of_engine)
                if reason is None:
                    layers.append(layer)
                else:
                    self._reasons[weight] = reason
        self._copies_fit = fits(model, bytes_a_value=2)
        groups = scale_groups(layers, merged_layers(model), self._why_apart)
        self._allocate_blocks(groups, [block for experts in grouped_experts(model) for block in experts.products()])
        for group in groups:
            if not group.filled:
                flat, whole = self._memory(group.layers)
                self._lay(group, whole, flat)
        self._plan: _Plan | None = None  # of the last step
        self._ready: torch.cuda.Event | None = None
        self._read_beside: Mapping[GatheredWeight, Shard] | None = None
        alone = [each for each in self._weights.values() if not each.keeps_16_bits]
        for gathered in alone:
            layer = cast(FP8Layer, gathered.layer)  # experts keep their values
            layer.register_state_dict_pre_hook(restore_weights)
            layer.register_load_state_dict_pre_hook(restore_weights)
        # of all or none: who reads a weight in 16 bits waits for no stream
        beside = len(alone) == len(self._weights) > 0 and alone[0].flat.is_cuda
        self._stream = torch.cuda.Stream(alone[0].flat.device) if beside else None

    def of(self, working: nn.Parameter) -> GatheredWeight | None:
        """Return what a working weight is sent as; None: it is sent in 16 bits."""
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
        counted = tuple(map(id, working))
        if counted != self._counted:
            self._counted, self._counts = counted, self._count_in_16_bits(working, shards)
        for (ranks, reason), (calls, payload) in self._counts.items():
            observer.count_plain(NAME, ranks, payload, reason, _GATHER, calls=calls)

    def _count_in_16_bits(
        self, working: Sequence[nn.Parameter], shards: Sequence[torch.Tensor]
    ) -> dict[tuple[int, str], tuple[int, int]]:
        """Return calls and bytes by ranks and reason."""
        counts: dict[tuple[int, str], tuple[int, int]] = {}
        for weight, shard in zip(working, shards, strict=True):
            groups, payload = self._optimizer.param_to_pg[weight], shard.nbytes
            reason = self._reasons.get(weight) or ("for a checkpoint" if weight in self else NOT_FP8)
            # the last of two groups gathers first, as in Colossal-AI, and the other one then sends what that has
            # gathered
            for group in reversed(groups) if isinstance(groups, tuple) else (groups,):
                ranks = ranks_of(group)
                calls, sent = counts.get((ranks, reason), (0, 0))
                counts[ranks, reason] = calls + 1, sent + payload
                payload *= ranks
        return counts

    def _why_not_cast(self, weight: nn.Parameter) -> str | None:
        if not self._optimizer._master_weights:
            return "no master weights"  # the weight is its own master: it must not be rounded to FP8
        return "extra_dp_size" if isinstance(self._optimizer.param_to_pg[weight], tuple) else None

    def _why_apart(self, merged: MergedLayers) -> str | None:
        """Return why weights that are multiplied as one cannot be gathered into one matrix; None: they can."""
        # one matrix is gathered by one call, over one group, and cast by one configuration
        together = (
            len({self._optimizer.param_to_pg[weight] for weight in merged.weights}) == 1
            and len({layer.fp8_config for layer in merged.layers}) == 1
            and not any(map(self._is_padded, merged.layers))
        )
        return None if together else "the weights are not gathered into one matrix"

    def _padded_size(self, layer: WeightHolder) -> int:
        """Return the number of values in all shards of a layer's weight."""
        return self._optimizer._working_param_to_padded_working_param[layer.held_weight].numel()

    def _is_padded(self, layer: WeightHolder) -> bool:
        return self._padded_size(layer) != layer.held_weight.numel()

    def _memory(self, layers: Sequence[WeightHolder]) -> tuple[torch.Tensor, QuantizedMatrix]:
        """Make memory for the shards of layers' weights, and for their FP8 matrix, stacked by rows, within it."""
        first, dtype = layers[0].held_weight, layers[0].fp8_config.weight_format
        columns = first.shape[-1]
        rows = sum(layer.held_weight.numel() for layer in layers) // columns
        flat = first.new_empty(sum(map(self._padded_size, layers)), dtype=dtype)
        # one that lies transposed is multiplied in forward by what is not gathered
        has_transpose = layers[0].fp8_config.keeps_transposes or layers[0].weight_is_transposed
        transpose = first.new_empty((columns, rows) if has_transpose else 0, dtype=dtype)
        inverse_scale = first.new_empty((), dtype=torch.float32)
        return flat, QuantizedMatrix(flat[: rows * columns].view(rows, columns), transpose, inverse_scale, None)

    def _allocate_blocks(self, groups: Sequence[ScaleGroup], blocks: Sequence[Sequence[FP8Layer]]) -> None:
        """Let weights that grouped products read as one, those of experts, lie stacked by rows in one matrix."""
        group_of = {layer: group for group in groups for layer in group.layers}
        for block in blocks:
            of_block = list(dict.fromkeys(group_of.get(layer) for layer in block))
            if None in of_block or [layer for group in of_block for layer in group.layers] != list(block):
                continue  # a product copies what it reads as one, once a step
            if any(map(self._is_padded, block)):
                continue
            _, (data, transpose, *_) = self._memory(block)
            begin = 0
            # in one place too, so that products read them without a copy
            scales = data.new_empty(len(of_block), dtype=torch.float32).unbind()
            for group, inverse_scale in zip(of_block, scales, strict=True):
                end = begin + sum(len(layer.held_weight) for layer in group.layers)
                columns = transpose[:, begin:end] if transpose.dim() == 2 else transpose
                self._lay(group, QuantizedMatrix(data[begin:end], columns, inverse_scale, None))
                begin = end

    def _lay(self, group: ScaleGroup, whole: QuantizedMatrix, flat: torch.Tensor | None = None) -> None:
        """Let a group's weights be gathered into a matrix, and their layers read it there.

        Args:
            group: of the weights.
            whole: their FP8 matrix.
            flat: its memory with padding, where a lone weight has some.
        """
        asked = group.layers[0].fp8_config.weight_copies.high_precision
        keeps_16_bits = self._copies_fit if asked is None else asked
        # the module's own forward, which runs where FP8 is not right or not faster, reads the parameters themselves
        keeps_16_bits |= isinstance(group.layers[0], ExpertWeight)
        for layer in group.layers:
            ways = () if keeps_16_bits else (self.restore, partial(self._keep, layer.held_weight))
            layer.fp8_weight = EngineWeight(layer.weight_is_transposed, *ways)
        if group.merged is not None:
            group.merged.fp8_weight = EngineWeight()
        group.lie_in(whole)
        for filled in group.filled:
            filled.source.always = not keeps_16_bits
        for layer, part in zip(group.layers, group.parts, strict=True):
            own = part.data.view(-1) if flat is None or len(group.layers) > 1 else flat
            self._weights[layer.held_weight] = GatheredWeight(layer, group, part, own, keeps_16_bits)

    @torch.no_grad()
    def publish(self, given: Mapping[GatheredWeight, Shard]) -> None:
        """Cast, gather and hand to the layers the weights of this step."""
        # steps mostly update the same weights; experts without tokens get no gradient
        if self._plan is None or self._plan.updated != list(given):
            self._plan = self._planned(list(given))
        masters = self._optimizer.working_to_master_param
        # one without a gradient is cast again too: its group's scale may have changed
        weights = {other: other.layer.held_weight for other in self._plan.others}
        given = {**given, **{each: (masters[id(weight)].to(weight.device), None) for each, weight in weights.items()}}
        with self._beside():
            for ranks, batches in self._plan.batches:
                self._send(batches, given, ranks)
        if self._stream is not None:
            self._read_beside = given  # so that the allocator gives their memory to nobody before `wait`

    def _planned(self, updated: list[GatheredWeight]) -> _Plan:
        by_ranks: dict[dist.ProcessGroup, list[ScaleGroup]] = {}
        # no set: its order would differ from rank to rank, and all must send the groups in one
        for group in dict.fromkeys(each.group for each in updated):
            by_ranks.setdefault(self._optimizer.param_to_pg[group.layers[0].held_weight], []).append(group)
        batches = [(ranks, list(self._batches(groups, ranks))) for ranks, groups in by_ranks.items()]
        sent = [each for _, of_ranks in batches for batch in of_ranks for each in batch.weights]
        return _Plan(updated, [each for each in sent if each not in set(updated)], batches)

    def _batches(self, groups: Sequence[ScaleGroup], ranks: dist.ProcessGroup) -> Iterator[WeightBatch]:
        """Divide the weights of groups into batches of about `BATCH_BYTES`; those that share a scale are in one."""
        batch: list[GatheredWeight] = []
        for group in groups:
            batch += [self._weights[layer.held_weight] for layer in group.layers]
            if group is groups[-1] or sum(gathered.flat.nbytes for gathered in batch) >= BATCH_BYTES:
                # batches end alike on every rank: sizes are of whole weights, with padding
                yield WeightBatch(batch, dist.get_world_size(ranks), dist.get_rank(ranks))
                batch = []

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """On a stream of its own where nothing but the layers, which wait, reads the weights."""
        if self._stream is None:
            yield
            return
        # the optimizer writes the masters on the current stream
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Make the current stream wait for the weights of the last step."""
        if self._stream is not None:
            # for the whole stream: each batch reads masters, which the next update overwrites
            torch.cuda.current_stream().wait_stream(self._stream)
            self._read_beside = None

    def _send(
        self, batches: Sequence[WeightBatch], given: Mapping[GatheredWeight, Shard], ranks: dist.ProcessGroup
    ) -> None:
        """Cast, gather and unpack batch by batch: while one is sent, the next is cast and the last is unpacked."""
        under_way: tuple[WeightBatch, list[dist.Work]] | None = None
        amaxes = batches[0].agree(given, ranks)
        for batch, following in zip_longest(batches, batches[1:]):
            batch.cast(given, amaxes)
            if following is not None:
                # first: it would wait for what is under way
                amaxes = following.agree(given, ranks)
            leaving = batch, gather_many(batch.messages, ranks)
            if under_way is not None:
                self._hand_over(*under_way)
            under_way = leaving
        if under_way is not None:
            self._hand_over(*under_way)

    def _hand_over(self, batch: WeightBatch, works: list[dist.Work]) -> None:
        for work in works:
            work.wait()
        batch.unpack()
        for each in batch.weights:
            if not each.keeps_16_bits:
                self._release(each)
        if self._stream is not None:
            self._ready = self._stream.record_event()
        # each as soon as it is there: layers must not wait for later batches
        fill_layers([filled for group in batch.groups for filled in group.filled], self._ready)

    def _release(self, gathered: GatheredWeight) -> None:
        """Give back the memory of a weight in 16 bits; who finds it among the parameters sees NaN."""
        weight = gathered.layer.held_weight
        if gathered.released and not any(weight.stride()):  # nobody gave it other data since the last step
            return
        # an expanded scalar keeps the shape, which autograd and modules ask for, and takes no memory
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

    @torch.no_grad()
    def _restore(self, gathered: GatheredWeight) -> None:
        if not gathered.released:
            return
        weight, quantized = gathered.layer.held_weight, gathered.quantized
        # of the padded size: a gather in 16 bits writes all of it
        padded = weight.new_zeros(gathered.flat.numel())
        self._optimizer._working_param_to_padded_working_param[weight] = padded
        gathered.released = False
        if any(weight.stride()):  # somebody gave it other data
            return
        values = padded[: weight.numel()].view(weight.shape)
        unpack([quantized.data], [quantized.inverse_scale], [None], [values.view(quantized.data.shape)])
        right = [filled for filled in gathered.group.filled if filled.is_right()]  # others may have been given data
        weight.data = values
        for holder, source, weights, matrix in right:
            holder.fp8_weight = source
            # the parameter has other memory now, by which the source tells whether its bytes are still right
            source.fill(weights, matrix)

    @contextmanager
    def values_of_masters(self) -> Iterator[None]:
        """Let what is written to the weights inside, the masters' values in 16 bits, count as values of these weights.

        It does for layers that multiply by what was gathered. Where other weights were loaded since, also into the
        masters, what was gathered is of neither.
        """
        # asked before the write, after which no layer's bytes would be known to be those of its weight
        right = [filled.is_right() for filled in self._filled()]
        yield
        for was_right, (_, source, weights, _) in zip(right, self._filled(), strict=True):
            if was_right:
                source.note_values(weights)
            else:
                source.forget()

    def drop(self) -> None:
        """Let layers cast their weights until the next step: what was gathered is of other masters."""
        for filled in self._filled():
            filled.source.drop()

    def _filled(self) -> Iterator[Filled]:
        for group in dict.fromkeys(gathered.group for gathered in self._weights.values()):
            yield from group.filled

"""FSDP2 (`fully_shard`) whose units gather the weights of FP8 layers and experts in FP8, straight for the products.

Each rank holds rows of a weight; of experts in one parameter, whole experts. When the model begins a forward its ranks
agree on the amaxes of all weights, in one message. Before a unit runs each rank casts its rows of it, and gathers these
bytes in one message with the unit's other parameters, which stay as they are. What was gathered is what the layers
multiply by. Backward gathers it again, by the same scales, and transposes it; the weight has no values in 16 bits,
unless somebody reads it without its layer. The optimizer updates the exact shards, and a checkpoint has these.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fp8booster.comm.fsdp import Buffers, fsdp_units
from fp8booster.comm.observer import observer
from fp8booster.comm.transport import one_tensor
from fp8booster.formats import FORMATS
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.nn.experts.fp8_experts import why_not_in
from fp8booster.nn.fsdp.bookkeeping import FP8FSDPParam, StayingFSDPParam
from fp8booster.nn.fsdp.flat_weights import NAME
from fp8booster.nn.fsdp.slots import Slot, Slots
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.modules import change_class
from fp8booster.nn.sharding import NOT_FP8, ScaleGroup, ShardedCast, scale_groups, why_not_cast
from fp8booster.nn.weights.holder import WeightHolder, weight_holders
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix

_GATHER = "all_gather_into_tensor"

_OVERRIDDEN = (
    "_init_extensions",
    "_sharded_local_tensor",
    "all_gather_inputs",
    "alloc_all_gather_outputs",
    "free_unsharded_param",
    "init_all_gather_outputs",
    "init_unsharded_param",
)

GATHERED = (
    "the model was sharded by fp8booster.fully_shard, which gathers the weights of its FP8 layers for them alone; "
    "convert and fuse a model before, or let fully_shard do it"
)
"""Why the layers are not converted or fused anew."""


_SMALL = 2**20
"""Values of the largest parameter that stays: norms, biases and routers, which take less than a percent of a layer."""


def why_not_gathered() -> str | None:
    """Return why this PyTorch's FSDP2 cannot gather in FP8, or None where it can."""
    missing = [name for name in _OVERRIDDEN if not hasattr(FSDPParam, name)]
    return f"this PyTorch's FSDP2 has no {missing[0]}" if missing else None


@dataclass(frozen=True, eq=False)
class _Place:
    """A weight that is gathered in FP8."""

    param: FP8FSDPParam
    layer: WeightHolder
    source: ReshardedWeight
    group: ScaleGroup  # of the weights that it shares a scale, and memory, with
    number: int  # of that group in its unit


class FP8Unit:
    """The weights of a unit that are gathered in FP8.

    Args:
        params: of the unit, all of which are of FP8 layers or experts that `why_not_cast` has no reason for.
        merged: layers of the unit that are multiplied as one, or one by one where their weights cannot be stacked.
        group: the ranks that hold the rows.
        state: of the unit: FSDP2's bookkeeping of its parameters.
        slots: gather into memory that stays, which other units may have in between; None: into memory that is freed.
    """

    def __init__(
        self,
        params: Sequence[FSDPParam],
        merged: Sequence[MergedLayers],
        group: dist.ProcessGroup,
        state: Any,
        slots: Slots | None = None,
    ) -> None:
        self._group, self._ranks, self._state, self._slots = group, group.size(), state, slots
        of_layer: dict[WeightHolder, Any] = {cast(WeightHolder, holder_of(param)): param for param in params}

        def why_apart(merged: MergedLayers) -> str | None:
            even = all(of_layer[layer]._orig_size[0] % self._ranks == 0 for layer in merged.layers)
            return None if even else "ranks do not hold as many rows each"

        self.groups = scale_groups(list(of_layer), merged, why_apart)
        self.places: list[_Place] = []
        for number, group_of in enumerate(self.groups):
            for layer in group_of.layers:
                param = of_layer[layer]
                FP8FSDPParam.convert_in_place(param, self)
                source = ReshardedWeight(layer.weight_is_transposed, param.restore_values)
                source.why_not_replaced = GATHERED
                layer.fp8_weight = source
                self.places.append(_Place(param, layer, source, group_of, number))
            if group_of.merged is not None:
                group_of.merged.fp8_weight.always = True
        self._place_of = {place.param: place for place in self.places}
        self.params = [place.param for place in self.places]
        self._sharded: ShardedCast | None = None
        self._for_forward: _Amaxes | None = None  # of all units, for the next gather of a forward
        self._for_backward: _Amaxes | None = None  # by which it was gathered last
        self._messages: dict[FP8FSDPParam, Tensor] = {}
        self._inverse_scales: Tensor | None = None
        self._memory: dict[ScaleGroup, Tensor] = {}
        self._slot: Slot | None = None
        self._is_apart = False  # it has a slot, and lies elsewhere, for another unit is there
        self._forward_was_apart = False
        self.uncounted = 0
        """Bytes of amaxes that ranks have told each other since the last gather."""

    def shards(self) -> list[Tensor]:
        """Return this rank's rows of all weights, of one dimension, as they are now."""
        return [param.shard.reshape(-1) for param in self.params]

    def expect(self, amaxes: _Amaxes | None) -> None:
        """Cast by these amaxes when the unit is gathered in a forward; None: by what its ranks agree on then."""
        self._for_forward = amaxes
        if amaxes is not None:
            self.uncounted += amaxes.values.nbytes

    def message_of(self, param: FP8FSDPParam) -> Tensor:
        """Return this rank's rows of a parameter in FP8, padded, of one dimension."""
        if param not in self._messages:
            self._cast()
        return self._messages.pop(param)

    @torch.no_grad()
    def _cast(self) -> None:
        """Cast this rank's rows of all weights of the unit, as they are now."""
        device = self.params[0].device
        if self._sharded is None or self._sharded.device != device:
            self._sharded = ShardedCast(self.groups, device)
        shards = self.shards()
        amaxes = self._amaxes(shards)
        # memory of their own at each gather: what was gathered before may still be read
        self._inverse_scales = new_inverse_scales(len(self.groups), device)
        scales = self._inverse_scales.unbind()
        outs: list[Tensor] = []
        messages: dict[FP8FSDPParam, Tensor] = {}
        for place, shard in zip(self.places, shards, strict=True):
            size, count = place.param.padded_sharded_param_size.numel(), shard.numel()
            message = torch.empty(size, dtype=_format(place.layer), device=device)
            if size > count:
                message.view(torch.uint8).zero_()
            outs.append(message[:count] if size > count else message)
            messages[place.param] = message
        self._sharded.cast(shards, amaxes, outs, [scales[place.number] for place in self.places])
        self._messages = messages

    def _amaxes(self, shards: Sequence[Tensor]) -> Tensor:
        """Return the amaxes to cast by, float32 [weights]."""
        # which are taken follows from the calls alone, which are the same on all ranks, and not from what a rank sees
        # of its weights: one that alone agreed anew would wait for ever
        state = self._state._training_state
        known = {TrainingState.FORWARD: self._for_forward, TrainingState.PRE_BACKWARD: self._for_backward}.get(state)
        if known is None:
            known = _Amaxes(cast(ShardedCast, self._sharded).agree(shards, self._group), None)
            self.uncounted += known.values.nbytes
        if state is TrainingState.FORWARD:
            self._for_forward = None
        # also of a unit that is gathered by hand, whose forward then gathers nothing
        self._for_backward = known
        if known.ready is not None:  # found on another stream than that which casts
            stream = torch.cuda.current_stream(known.values.device)
            known.ready.wait(stream)
            known.values.record_stream(stream)
        return known.values

    def memory_of(self, param: FP8FSDPParam) -> Tensor:
        """Return the memory that a parameter is gathered into, with its padding; FP8, of one dimension."""
        group = self._place_of[param].group
        if not self._memory:
            if self._slots is None:
                made = self._new_memory()
            else:
                whole_after_forward = self._state.post_forward_mesh_info is None
                kinds = tuple(self._kinds())
                self._slot = self._slots.take(kinds, param.device, alone=whole_after_forward)
                made = self._slot.memory
            self._memory = dict(zip(self.groups, made, strict=True))
        members = [place.param for place in self.places if place.group is group]
        return self._memory[group].split(self._sizes(group))[members.index(param)]

    def _kinds(self) -> list[tuple[int, torch.dtype]]:
        """Return the number of values and the format of each piece of memory."""
        return [(sum(self._sizes(group)), _format(group.layers[0])) for group in self.groups]

    def _new_memory(self) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=self.params[0].device) for size, dtype in self._kinds()]

    def _sizes(self, group: ScaleGroup) -> list[int]:
        members = [place.param for place in self.places if place.group is group]
        return [param.padded_sharded_param_size.numel() * self._ranks for param in members]

    def allocate(self, param: FP8FSDPParam) -> None:
        """Give the memory that a parameter is gathered into its size again, for all weights that lie there."""
        if self._slot is not None and self._take(self._slot):
            return
        whole = self._memory[self._place_of[param].group]
        storage = whole.untyped_storage()
        if storage.size() != whole.nbytes:
            storage.resize_(whole.nbytes)

    def _take(self, slot: Slot) -> bool:
        """Take the slot for what is gathered now, or memory of the unit's own where another unit is there."""
        in_backward = self._state._training_state is TrainingState.PRE_BACKWARD
        other = None if slot.owner is self else slot.owner
        if other is not None and in_backward and not self._forward_was_apart:
            # the graph that ran forward goes backward here; a unit that came later, and stays, has gone backward
            other.step_aside()
            other = None
        self._gather_apart(other is not None)
        if not in_backward:
            self._forward_was_apart = self._is_apart
        if other is None:
            slot.owner = self
        return other is None

    def step_aside(self) -> None:
        """Lay what was gathered into the slot elsewhere, for another unit that must have it."""
        slot = cast(Slot, self._slot)
        self._gather_apart(True)
        for place, whole in zip(self._memory.values(), slot.memory, strict=True):
            place.copy_(whole)
        self._inverse_scales = slot.inverse_scales.clone()
        self.fill()

    def _gather_apart(self, is_apart: bool) -> None:
        """Gather into memory of the unit's own, or into the slot, from now on."""
        if is_apart == self._is_apart:
            return
        self._is_apart = is_apart
        memory = self._new_memory() if is_apart else cast(Slot, self._slot).memory
        self._memory = dict(zip(self.groups, memory, strict=True))
        vars(self).pop("_to_fill", None)
        for place in self.places:
            place.param.all_gather_outputs = [self.memory_of(place.param)]

    @property
    def _is_in_slot(self) -> bool:
        return self._slot is not None and not self._is_apart

    def fill(self) -> None:
        """Hand the layers their FP8 weights, once for each gather."""
        if self._inverse_scales is None:
            return
        made, self._inverse_scales = self._inverse_scales, None
        if made.is_cuda:  # on the stream that gathers
            made.record_stream(torch.cuda.current_stream(made.device))
        if self._is_in_slot:
            made = cast(Slot, self._slot).inverse_scales.copy_(made)
        scales = made.unbind()
        for source, quantized, number in self._to_fill:
            source.moves = not self._is_in_slot
            source.fill((), quantized._replace(inverse_scale=scales[number]))

    @cached_property
    def _to_fill(self) -> list[tuple[ReshardedWeight, QuantizedMatrix, int]]:
        """Return what each source of weights is filled with at every gather, but for its scale, and the number of that.

        All of it lies in the memory that is gathered into.
        """
        to_fill: list[tuple[ReshardedWeight, QuantizedMatrix, int]] = []
        for place in self.places:
            *rows, columns = place.param._orig_size
            data = place.param.all_gather_outputs[0].view(-1, columns)[: math.prod(rows)]
            nothing = data.new_empty(0)
            unscaled = nothing.new_empty(0, dtype=torch.float32)
            stored = QuantizedMatrix(data, nothing, unscaled, None)
            to_fill.append((place.source, place.layer.in_product_layout(stored), place.number))
            if place.group.merged is not None and place.layer is place.group.layers[-1]:
                whole = self._memory[place.group].view(-1, columns)
                source = cast(ReshardedWeight, place.group.merged.fp8_weight)
                to_fill.append((source, stored._replace(data=whole), place.number))
        return to_fill

    def gathered_of(self, param: FP8FSDPParam) -> QuantizedMatrix | None:
        """Return the FP8 weight of a parameter as it lies; None: it is not gathered."""
        held = self._place_of[param].source.held
        if held is None or held.data.numel():
            return held
        return held._replace(data=held.transpose)

    def forget(self, param: FP8FSDPParam) -> bool:
        """Take from the layer what was gathered, and tell whether its memory stays."""
        place = self._place_of[param]
        place.source.forget()
        if place.group.merged is not None:
            place.group.merged.fp8_weight.forget()
        if not self._is_in_slot:
            return False
        slot = cast(Slot, self._slot)
        if slot.owner is self:
            slot.owner = None
        return True


class _Amaxes(NamedTuple):
    """Holds what the weights of a unit are cast by."""

    values: Tensor  # float32 [weights]
    ready: torch.cuda.Event | None  # when they were found on another stream than that which casts


class _ForwardAmaxes:
    """Lets ranks agree on the amaxes of all units of a model when it begins a forward, in one message.

    Args:
        units: of the model, held by the same ranks.
        group: these ranks.
    """

    def __init__(self, units: Sequence[FP8Unit], group: dist.ProcessGroup) -> None:
        self._units, self._group = units, group
        self._groups = [each for unit in units for each in unit.groups]
        self._sharded: ShardedCast | None = None

    def follow(self, model: nn.Module) -> None:
        """Do so for the forwards of a model; its units agree by themselves when they run without it."""
        model.register_forward_pre_hook(self._before, prepend=True)
        model.register_forward_hook(self._after, always_call=True)

    @torch.no_grad()
    def _before(self, model: Any, *_: Any) -> None:
        state = model._get_fsdp_state()
        if state._training_state is not TrainingState.IDLE:
            return  # made again in backward, which gathers as the forward did
        state._lazy_init()  # which looks for tensors that took the places of others since the model was sharded
        device = self._units[0].params[0].device
        if self._sharded is None or self._sharded.device != device:
            self._sharded = ShardedCast(self._groups, device)
        amaxes = self._sharded.agree([shard for unit in self._units for shard in unit.shards()], self._group)
        ready = None
        if amaxes.is_cuda:
            ready = torch.cuda.Event()
            ready.record()
        for unit, values in zip(self._units, amaxes.split([len(unit.params) for unit in self._units]), strict=True):
            unit.expect(_Amaxes(values, ready))

    def _after(self, *_: Any) -> None:
        for unit in self._units:
            unit.expect(None)


def _format(layer: WeightHolder) -> torch.dtype:
    return layer.fp8_config.weight_format


class UnitGather(Buffers, AllGather):
    """Gathers the parameters of a unit as they are given, and counts them.

    Args:
        unit: of the weights that are given in FP8; None: of none.
        reasons: why the others of FP8 layers are not.
    """

    def __init__(self, unit: FP8Unit | None, reasons: Collection[str]) -> None:
        self._unit, self._reason = unit, ", ".join([NOT_FP8, *sorted(set(reasons))])

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gather."""
        ranks, plain = group.size(), input_tensor.nbytes
        if self._unit is not None:
            params = self._unit.params
            sent = sum(param.padded_sharded_param_size.numel() for param in params)
            item = (params[0].param_dtype or params[0].orig_dtype).itemsize
            transports = {_GATHER: sent, "all_reduce": self._unit.uncounted}
            self._unit.uncounted = 0
            observer.count_encoded(NAME, ranks, sent * item, transports, _GATHER)
            plain -= sent
        if plain:
            observer.count_plain(NAME, ranks, plain, self._reason, _GATHER)
        if input_tensor.dtype in FORMATS:  # of a unit that has nothing else, which gloo and older NCCL do not know
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return one_tensor("all_gather")(output_tensor, input_tensor, group, async_op)


def gather_in_fp8(
    model: nn.Module,
    merged_in: Mapping[nn.Module, Sequence[MergedLayers]],
    kept: Mapping[int, str],
    *,
    stay: Collection[nn.Module] = (),
) -> None:
    """Let the units of a model gather the weights of its FP8 layers in FP8; before its first forward.

    Args:
        model: on which FSDP2's `fully_shard` was called, with FP8 layers that follow its resharding.
        merged_in: by unit, layers that are multiplied as one.
        kept: by their identities, layers whose weights are gathered in 16 bits, and why.
        stay: units that are gathered into memory which stays, for CUDA graphs.
    """
    slots = Slots()
    units: dict[dist.ProcessGroup, list[FP8Unit]] = {}
    for module in fsdp_units(model):
        chosen: list[FSDPParam] = []
        reasons = []
        params = params_of(module)
        for param in params:
            layer = holder_of(param)
            if layer is None:
                continue
            readers = 1 + len(param._module_info.shared_modules)
            of_engine = kept.get(id(param._module_info.module))
            dtype = module._get_fsdp_state()._mp_policy.param_dtype or param.sharded_param.dtype
            of_engine = of_engine or why_not_in(dtype, layer)
            reason = why_not_cast(layer, readers=readers, shape=param._orig_size[-2:], of_engine=of_engine)
            if reason is None and param.post_forward_mesh_info not in (None, param.mesh_info):
                reason = "spread over fewer ranks after forward"
            if reason is None and hasattr(param, "_unsharded_param"):
                reason = "gathered before"
            if reason is None and param.mesh_info.shard_process_group.size() == 1:
                # FSDP2 copies each into memory of its own, and cuts short what several share
                reason = "one rank has them whole"
            if reason is None:
                chosen.append(param)
            else:
                reasons.append(reason)
        unit = None
        if chosen:
            group = chosen[0].mesh_info.shard_process_group
            param_group = module._get_fsdp_state()._fsdp_param_group
            unit = FP8Unit(chosen, merged_in.get(module, ()), group, param_group, slots if module in stay else None)
            for param in params if module in stay else ():
                if param not in chosen and param._orig_size.numel() <= _SMALL:
                    change_class(param, StayingFSDPParam)
            units.setdefault(group, []).append(unit)
        if params:
            module.set_custom_all_gather(UnitGather(unit, reasons))
    if isinstance(model, FSDPModule):
        for ranks, of_ranks in units.items():
            _ForwardAmaxes(of_ranks, ranks).follow(model)


def holder_of(param: FSDPParam) -> WeightHolder | None:
    """Return the FP8 layer or experts that multiply by a parameter; None: it is not multiplied in FP8."""
    return weight_holders(param._module_info.module).get(param._module_info.param_name)


def params_of(unit: FSDPModule) -> list[FSDPParam]:
    """Return the bookkeeping of the parameters of a unit."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params

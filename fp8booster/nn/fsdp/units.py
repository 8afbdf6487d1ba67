"""FSDP2 (`fully_shard`) whose units gather the weights of FP8 layers and experts in FP8, straight for the products.

Each rank holds rows of a weight; of experts in one parameter, whole experts. Before a unit runs its ranks agree on the
amax of each weight, cast their rows, and gather these bytes in one message with the unit's other parameters, which stay
as they are. What was gathered is what the layers multiply by. Backward gathers it again and transposes it; the weight
has no values in 16 bits, unless somebody reads it without its layer. The optimizer updates the exact shards, and a
checkpoint has these.

FSDP2 lets the local tensor of a parameter say what it sends and what is made of it: `fsdp_pre_all_gather` and
`fsdp_post_all_gather`. A parameter's bookkeeping, `FSDPParam`, asks the tensor for them; a subclass, put in place by
class, answers for it here, as tensors change when a state is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from fp8booster.comm.observer import observer
from fp8booster.comm.transport import one_tensor
from fp8booster.formats import FORMATS
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.experts.fp8_experts import weight_holders, why_not_in
from fp8booster.nn.fsdp.flat_weights import NAME
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.modules import change_class
from fp8booster.nn.sharding import NOT_FP8, ScaleGroup, ShardedCast, WeightHolder, scale_groups, why_not_cast
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix

_GATHER = "all_gather_into_tensor"

_OVERRIDDEN = (
    "_init_extensions",
    "_sharded_local_tensor",
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


def why_not_gathered() -> str | None:
    """Return why this PyTorch's FSDP2 cannot gather in FP8, or None where it can."""
    missing = [name for name in _OVERRIDDEN if not hasattr(FSDPParam, name)]
    return f"this PyTorch's FSDP2 has no {missing[0]}" if missing else None


class FP8FSDPParam(FSDPParam):
    """The bookkeeping of an FP8 layer's weight that is gathered in FP8."""

    fp8_unit: FP8Unit
    fp8_message: _Message

    @classmethod
    def convert_in_place(cls, param: FSDPParam, unit: FP8Unit) -> None:
        """Turn the bookkeeping of a parameter into this class in place."""
        converted = change_class(param, cls)
        converted.fp8_unit, converted.fp8_message = unit, _Message(converted)
        converted._init_extensions()

    @property
    def shard(self) -> Tensor:
        """This rank's rows of the weight, [rows, K], in the dtype of the masters."""
        local: Any = FSDPParam._sharded_local_tensor
        return local.fget(self).detach()

    @property
    def _sharded_local_tensor(self) -> Any:
        return self.fp8_message

    def init_all_gather_outputs(self, *arguments: Any, **named: Any) -> None:
        """Gather into rows of the matrix of all weights that are multiplied as one."""
        if not self.all_gather_outputs:
            self.all_gather_outputs = [self.fp8_unit.memory_of(self)]

    def alloc_all_gather_outputs(self) -> None:
        """Take memory for it again, with that of the others."""
        if self.all_gather_outputs:
            self.fp8_unit.allocate(self)

    def init_unsharded_param(self) -> None:
        """Make the parameter, whose memory is one value, seen through its shape."""
        super().init_unsharded_param()
        self._drop_values()

    def free_unsharded_param(self) -> None:
        self.fp8_unit.forget(self)
        super().free_unsharded_param()
        if hasattr(self, "_unsharded_param"):
            self._drop_values()  # where somebody has read them

    def restore_values(self) -> None:
        """Give the parameter values in 16 bits, as long as it is gathered."""
        quantized = self.fp8_unit.gathered_of(self)
        if quantized is None:
            return
        if not any(self._unsharded_param.stride()):
            values = torch.empty(self._orig_size, dtype=self._unsharded_param.dtype, device=self.device)
            unpack([quantized.data], [quantized.inverse_scale], [None], [values.view(quantized.data.shape)])
            self._unsharded_param.data = values

    def _drop_values(self) -> None:
        if any(self._unsharded_param.stride()):
            # NaN, so that who reads it all the same does not compute on
            nothing = torch.full((), torch.nan, dtype=self._unsharded_param.dtype, device=self.device)
            self._unsharded_param.data = nothing.expand(self._orig_size)


class _Message:
    """Stands for the local tensor of a parameter where FSDP2 asks it what to send.

    Args:
        param: the bookkeeping of the parameter.
    """

    def __init__(self, param: FP8FSDPParam) -> None:
        self._param = param

    def size(self) -> torch.Size:
        """Return the shape of the rows."""
        return self._param.shard.size()

    def to(self, *_: Any, **__: Any) -> _Message:
        """Return itself: what is offloaded is cast where it goes."""
        return self

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return this rank's rows in FP8, with rows of zeros for FSDP2's padding, and the inverse scale."""
        values, inverse_scale = self._param.fp8_unit.message_of(self._param)
        return (values,), inverse_scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Tensor,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Hand the layer what was gathered; return what the parameter is made of at first, which is freed then."""
        self._param.fp8_unit.fill(self._param, all_gather_outputs[0], metadata)
        if out is not None:
            return None
        return torch.empty(self._param._orig_size, dtype=param_dtype, device=self._param.device), ()


@dataclass(frozen=True, eq=False)
class _Place:
    """A weight that is gathered in FP8."""

    param: FP8FSDPParam
    layer: WeightHolder
    source: ReshardedWeight
    group: ScaleGroup  # of the weights that it shares a scale, and memory, with


class FP8Unit:
    """The weights of a unit that are gathered in FP8.

    Args:
        params: of the unit, all of which are of FP8 layers or experts that `why_not_cast` has no reason for.
        merged: layers of the unit that are multiplied as one, or one by one where their weights cannot be stacked.
        group: the ranks that hold the rows.
    """

    def __init__(self, params: Sequence[FSDPParam], merged: Sequence[MergedLayers], group: dist.ProcessGroup) -> None:
        self._group, self._ranks = group, group.size()
        of_layer: dict[WeightHolder, Any] = {cast(WeightHolder, holder_of(param)): param for param in params}

        def why_apart(merged: MergedLayers) -> str | None:
            even = all(of_layer[layer]._orig_size[0] % self._ranks == 0 for layer in merged.layers)
            return None if even else "ranks do not hold as many rows each"

        self.groups = scale_groups(list(of_layer), merged, why_apart)
        self.places: list[_Place] = []
        for group_of in self.groups:
            for layer in group_of.layers:
                param = of_layer[layer]
                FP8FSDPParam.convert_in_place(param, self)
                source = ReshardedWeight(layer.weight_is_transposed, param.restore_values)
                source.why_not_replaced = GATHERED
                layer.fp8_weight = source
                self.places.append(_Place(param, layer, source, group_of))
            if group_of.merged is not None:
                group_of.merged.fp8_weight.always = True
        self._place_of = {place.param: place for place in self.places}
        self._sharded: ShardedCast | None = None
        self._messages: dict[FSDPParam, tuple[Tensor, Tensor]] = {}
        self._memory: dict[ScaleGroup, Tensor] = {}

    def message_of(self, param: FP8FSDPParam) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of a parameter in FP8, padded, and the inverse scale, float32 []."""
        if param not in self._messages:
            self._cast()
        return self._messages.pop(param)

    @torch.no_grad()
    def _cast(self) -> None:
        """Cast this rank's rows of all weights of the unit, as they are now."""
        params = [place.param for place in self.places]
        device = params[0].device
        if self._sharded is None or self._sharded.device != device:
            self._sharded = ShardedCast(self.groups, device)
        shards = [param.shard.reshape(-1) for param in params]
        # at each gather, whether or not a weight has changed: a rank that alone saw a change would wait for ever
        amaxes = self._sharded.agree(shards, self._group)
        # memory of their own at each gather: what was gathered before may still be read
        scales = dict(zip(self.groups, new_inverse_scales(len(self.groups), device).unbind(), strict=True))
        of_weights = [scales[place.group] for place in self.places]
        messages = [
            torch.empty(place.param.padded_sharded_param_size, dtype=_format(place), device=device)
            for place in self.places
        ]
        for message, shard in zip(messages, shards, strict=True):
            if message.numel() > shard.numel():
                message.view(torch.uint8).zero_()
        outs = [message.view(-1)[: shard.numel()] for message, shard in zip(messages, shards, strict=True)]
        self._sharded.cast(shards, amaxes, outs, of_weights)
        self._messages = dict(zip(params, zip(messages, of_weights, strict=True), strict=True))

    def memory_of(self, param: FP8FSDPParam) -> Tensor:
        """Return the memory that a parameter is gathered into, with its padding; FP8, of one dimension."""
        place = self._place_of[param]
        members = [each for each in self.places if each.group is place.group]
        sizes = [each.param.padded_sharded_param_size.numel() * self._ranks for each in members]
        if place.group not in self._memory:
            self._memory[place.group] = torch.empty(sum(sizes), dtype=_format(place), device=param.device)
        return self._memory[place.group].split(sizes)[members.index(place)]

    def allocate(self, param: FP8FSDPParam) -> None:
        """Give the memory that a parameter is gathered into its size again, for all weights that lie there."""
        whole = self._memory[self._place_of[param].group]
        storage = whole.untyped_storage()
        if storage.size() != whole.nbytes:
            storage.resize_(whole.nbytes)

    def fill(self, param: FP8FSDPParam, gathered: Tensor, inverse_scale: Tensor) -> None:
        """Hand the layer of a parameter its FP8 weight, and with the last of some that are multiplied as one, these."""
        if inverse_scale.is_cuda:  # made on the stream that gathers
            inverse_scale.record_stream(torch.cuda.current_stream(inverse_scale.device))
        place = self._place_of[param]
        layer, group = place.layer, place.group
        *rows, columns = param._orig_size
        data = gathered.view(-1, columns)[: math.prod(rows)]
        nothing = data.new_empty(0)
        weights = [layer.held_weight]
        place.source.fill(weights, layer.in_product_layout(QuantizedMatrix(data, nothing, inverse_scale, None)))
        if group.merged is not None and layer is group.layers[-1]:
            whole = self._memory[group].view(-1, columns)
            group.merged.fp8_weight.fill(weights, QuantizedMatrix(whole, nothing, inverse_scale, None))

    def gathered_of(self, param: FP8FSDPParam) -> QuantizedMatrix | None:
        """Return the FP8 weight of a parameter as it lies; None: it is not gathered."""
        held = self._place_of[param].source.held
        if held is None or held.data.numel():
            return held
        return held._replace(data=held.transpose)

    def forget(self, param: FP8FSDPParam) -> None:
        """Take from the layer what was gathered, whose memory goes."""
        place = self._place_of[param]
        place.source.forget()
        if place.group.merged is not None:
            place.group.merged.fp8_weight.forget()


def _format(place: _Place) -> torch.dtype:
    return place.layer.fp8_config.weight_format


class UnitGather(AllGather):
    """Gathers the parameters of a unit as they are given, and counts them.

    Args:
        unit: of the weights that are given in FP8; None: of none.
        reasons: why the others of FP8 layers are not.
    """

    def __init__(self, unit: FP8Unit | None, reasons: Collection[str]) -> None:
        self._unit, self._reason = unit, ", ".join([NOT_FP8, *sorted(set(reasons))])

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Make memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Gather."""
        ranks, plain = group.size(), input_tensor.nbytes
        if self._unit is not None:
            params = [place.param for place in self._unit.places]
            sent = sum(param.padded_sharded_param_size.numel() for param in params)
            item = (params[0].param_dtype or params[0].orig_dtype).itemsize
            transports = {_GATHER: sent, "all_reduce": 4 * len(params)}
            observer.count_encoded(NAME, ranks, sent * item, transports, _GATHER)
            plain -= sent
        if plain:
            observer.count_plain(NAME, ranks, plain, self._reason, _GATHER)
        if input_tensor.dtype in FORMATS:  # of a unit that has nothing else, which gloo and older NCCL do not know
            output_tensor, input_tensor = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
        return one_tensor("all_gather")(output_tensor, input_tensor, group, async_op)


def gather_in_fp8(
    model: nn.Module, merged_in: Mapping[nn.Module, Sequence[MergedLayers]], kept: Mapping[int, str]
) -> None:
    """Let the units of a model gather the weights of its FP8 layers in FP8; before its first forward.

    Args:
        model: on which FSDP2's `fully_shard` was called, with FP8 layers that follow its resharding.
        merged_in: by unit, layers that are multiplied as one.
        kept: by their identities, layers whose weights are gathered in 16 bits, and why.
    """
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
            unit = FP8Unit(chosen, merged_in.get(module, ()), chosen[0].mesh_info.shard_process_group)
        if params:
            module.set_custom_all_gather(UnitGather(unit, reasons))


def holder_of(param: FSDPParam) -> WeightHolder | None:
    """Return the FP8 layer or experts that multiply by a parameter; None: it is not multiplied in FP8."""
    return weight_holders(param._module_info.module).get(param._module_info.param_name)


def fsdp_units(model: nn.Module) -> list[Any]:
    """Return the modules of a model that FSDP2's `fully_shard` was called on."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def params_of(unit: FSDPModule) -> list[FSDPParam]:
    """Return the bookkeeping of the parameters of a unit."""
    group = unit._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params

"""PyTorch's own data parallelism in FP8, each by one call: FSDP2 and DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fp8booster.comm.ddp import BUCKET_MB, DDPState, ddp_hook
from fp8booster.comm.encoding import Encoding
from fp8booster.comm.fsdp import compress_fsdp, fsdp_units
from fp8booster.comm.threshold import use_links
from fp8booster.config import FP8Config, config_or_default
from fp8booster.engine import DDP, FSDP, Engine
from fp8booster.nn.convert import convert_to_fp8
from fp8booster.nn.fsdp.bookkeeping import MovingFSDPParam
from fp8booster.nn.fsdp.earlier_optimizers import note_replaced
from fp8booster.nn.fsdp.resharding import follow_units
from fp8booster.nn.fsdp.units import gather_in_fp8, params_of, why_not_gathered
from fp8booster.nn.fused import fuse_model, leave_unfused
from fp8booster.nn.fused.decoder import FusedDecoderLayer
from fp8booster.nn.graphs import capture_as_configured
from fp8booster.nn.graphs.capture import CapturedLayer
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import change_class, inside_wrappers, repeated_layers, require_module, vocabulary_heads


def fully_shard(
    model: nn.Module,
    config: FP8Config | None = None,
    *,
    mesh: DeviceMesh | None = None,
    units: Iterable[nn.Module] | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
) -> nn.Module:
    """Convert a model to FP8, fuse it, and shard it by FSDP2, in place.

    Each decoder layer is a unit, and the root has the rest. The weights of FP8 layers are gathered in FP8: the bytes
    that are sent are those that are multiplied, and no weight outlives the layer that it was gathered for. Gradients
    are reduced in FP8. Parameters keep their names; as with torch's `fully_shard` they are DTensors from here on, so
    make the optimizer afterwards: one that was made before refuses to step. `torch.distributed.checkpoint` saves and
    loads them as they are.

    Args:
        model: converted and fused already, or not; on any device, meta too.
        config: of the FP8 layers; None keeps that of a converted model, and else is `FP8Config()`. A warning names each
            option that has no effect here. With `messages=None` weights and gradients are sent in 16 bits. Where
            `cuda_graphs` makes CUDA graphs of decoder layers, memory for the FP8 weights of two stays, where those of
            all layers are gathered by turns.
        mesh: of one dimension, or of two, (replicas, shards); None: all ranks.
        units: modules that are gathered at once, the inner ones first; None: the members of each list of layers.
        reshard_after_forward: as torch's. With a number, which spreads weights over fewer ranks after forward, weights
            are gathered in 16 bits.
        mp_policy: as torch's; None gathers other parameters, and computes, in BF16.
        offload_policy: as torch's; None offloads nothing.

    Returns:
        The model.

    Raises:
        ValueError: the model, or a module of it, is sharded, wrapped or compiled already, or is fused and the
            configuration given has `fused=False`.
        TypeError: the model or a unit is no module, or the configuration no FP8Config.
    """
    given = None if units is None else _modules_of(units)
    config = _prepared(model, config, "fully_shard", FSDP)
    if config.fused:
        fuse_model(model)
    capture_as_configured(model, config)
    frozen = [module for module in model.modules() if isinstance(module, FrozenLayer)]
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16) if mp_policy is None else mp_policy,
        "offload_policy": OffloadPolicy() if offload_policy is None else offload_policy,
        # FP8 alone is there of these, which a policy would cast; each rank keeps them whole
        "ignored_params": {each for layer in frozen for each in layer.parameters()},
    }
    before = [weakref.ref(each) for each in model.parameters()]  # their memory is to go when shards take their place
    for unit in dict.fromkeys(repeated_layers(model) if given is None else given):  # a layer may run several times
        shard_by_torch(unit, **options)
    shard_by_torch(model, **options)
    after = set(map(id, model.parameters()))
    note_replaced(each for held in before if (each := held()) is not None and id(each) not in after)
    for layer in frozen:  # FSDP2 moves what it shards alone
        if not next(layer.parameters()).is_meta:
            layer.to(next(param.device for unit in fsdp_units(model) for param in params_of(unit)))
    follow_fsdp2(model, config.messages)
    _reduce_all_experts(model)
    return model


def follow_fsdp2(model: nn.Module, messages: Encoding | None) -> None:
    """Let a model that FSDP2 has sharded keep no FP8 weight between forward and backward, and communicate in FP8.

    Args:
        model: converted and fused before it was sharded, with the layers that become CUDA graphs. Weights that were
            gathered already are gathered in 16 bits.
        messages: how gradients are sent; None: neither they nor weights are sent in FP8.
    """
    unit_of: dict[nn.Module, nn.Module] = {}
    for unit in fsdp_units(model):
        if isinstance(inside_wrappers(unit), FusedDecoderLayer):
            # what it is given was made by parameters in this dtype, and a cast loses the boundaries of packed sequences
            state = cast(FSDPModule, unit)._get_fsdp_state()
            state._mp_policy = replace(state._mp_policy, cast_forward_inputs=False)
        for param in params_of(unit):
            change_class(param, MovingFSDPParam)
            for module in (param._module_info.module, *param._module_info.shared_modules):
                unit_of[module] = unit
    merged_in = follow_units(model, unit_of)
    if messages is not None:
        compress_fsdp(model, gather=False, encoding=messages)
        if why_not_gathered() is None:
            kept = dict.fromkeys(vocabulary_heads(model), "a loss may read it whole")
            gather_in_fp8(model, merged_in, kept, stay=_units_of_graphs(model, unit_of))


def _units_of_graphs(model: nn.Module, unit_of: Mapping[nn.Module, nn.Module]) -> set[nn.Module]:
    """Return the units that are gathered outside the layers that become CUDA graphs, with weights of these."""
    captured = {module for module in model.modules() if isinstance(module, CapturedLayer)}
    inside = {module for layer in captured for module in layer.modules()}
    return {unit_of[module] for module in inside & unit_of.keys()} - (inside - captured)


def data_parallel(
    model: nn.Module, config: FP8Config | None = None, *, process_group: dist.ProcessGroup | None = None, **options: Any
) -> DistributedDataParallel:
    """Convert a model to FP8, fuse it, and let PyTorch's DistributedDataParallel train it, with gradients in FP8.

    Each rank holds the whole model, on its device. In FP32 run it under `torch.autocast`, else give it in BF16.

    Args:
        model: converted and fused already, or not, on the device where it trains.
        config: of the FP8 layers; None keeps that of a converted model, and else is `FP8Config()`. A warning names each
            option that has no effect here. With `messages=None` gradients are sent in their precision.
        process_group: the ranks that average gradients; None: all.
        options: of DistributedDataParallel; `bucket_cap_mb` is 64 unless given, for larger messages gain more.

    Returns:
        The model in DDP's wrapper.

    Raises:
        ValueError: the model, or a module of it, is sharded, wrapped or compiled already, or is fused and the
            configuration given has `fused=False`.
        TypeError: the model is no module, or the configuration no FP8Config.
    """
    config = _prepared(model, config, "data_parallel", DDP)
    # before the wrapper, which looks at parameters when it is made
    if config.fused:
        fuse_model(model)
    capture_as_configured(model, config)
    wrapped = DistributedDataParallel(model, process_group=process_group, **{"bucket_cap_mb": BUCKET_MB, **options})
    if config.messages is not None:
        wrapped.register_comm_hook(DDPState(group=process_group, encoding=config.messages), ddp_hook)
    return wrapped


def _modules_of(units: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the units that were given; TypeError for classes and names in place of modules."""
    given = list(units) if isinstance(units, Iterable) else [units]
    for each in given:
        if not isinstance(each, nn.Module):
            raise TypeError(f"units has {each!r}; give modules of the model, as list(model.model.layers)")
    return given


def _prepared(model: nn.Module, config: FP8Config | None, function: str, engine: Engine) -> FP8Config:
    """Convert a model that nothing has sharded yet, and return the configuration of its layers."""
    require_module(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"the model was sharded by fully_shard already; give it to fp8booster.{function} as it was before, "
                "which shards it by itself"
            )
        if isinstance(module, (DistributedDataParallel, FullyShardedDataParallel)):
            raise ValueError(
                f"the model is in {type(module).__name__} already; give the one inside to fp8booster.{function}"
            )
        if isinstance(module, OptimizedModule):
            raise ValueError(f"the model was compiled already; compile what fp8booster.{function} returns")
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ValueError(
            "parameters of the model are DTensors, as parallelize_module makes them, which FP8 kernels cannot read; "
            "give a model that is not split over ranks"
        )
    held = next((module.fp8_config for module in model.modules() if isinstance(module, FP8Layer)), None)
    if config is None and held is not None:
        config = held
        # nobody need have asked for no transposes: a large model is converted so
        given = replace(held, weight_copies=replace(held.weight_copies, transposes=None))
        engine.used_with_warnings(given, stacklevel=3)
    else:
        config = engine.used_with_warnings(config_or_default(config), stacklevel=3)
        if not config.fused:
            leave_unfused(model)
    if config is not held:
        convert_to_fp8(model, config)
    if config.messages is not None:
        use_links()
    return config


def _reduce_all_experts(model: nn.Module) -> None:
    """Let ranks reduce gradients of the same parameters: one's tokens may leave out experts that another's choose."""
    blocks = [block for block in model.modules() if isinstance(block._modules.get("experts"), nn.ModuleList)]
    if not blocks:
        return
    reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)
    if reduce_unused is not None:
        reduce_unused(True)
        return
    # grouped products give every expert a gradient
    as_one = [getattr(block, "fp8_grouped_experts", None) for block in blocks]
    if any(each is None or each.why_one_by_one is not None for each in as_one):
        raise ValueError(
            "the model has experts that are modules and run one by one, of which a rank's tokens may leave some out, "
            "and this PyTorch's FSDP2 cannot reduce gradients that one rank alone has; take PyTorch 2.13 or later"
        )

"""Mends of saving and loading."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.compat.background_writer import BackgroundFileWriter
from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(
    module="colossalai.utils.safetensors", place="utils/safetensors.py:10-15", needed_when="tensornvme is not installed"
)
def async_save_without_tensornvme(module: ModuleType, patch: Patch) -> None:
    """`use_async=True` writes checkpoints in a thread where tensornvme is not installed.

    Without it: NameError: name 'AsyncFileWriter' is not defined. No longer needed when
    colossalai.utils.safetensors defines that name without tensornvme.
    """
    if not hasattr(module, "AsyncFileWriter"):
        patch.set(module, "AsyncFileWriter", BackgroundFileWriter)


@mend(
    module="colossalai.checkpoint_io.utils", place="checkpoint_io/utils.py:965-968", needed_when="no CUDA or NPU device"
)
def cpu_memory_is_not_pinned(module: ModuleType, patch: Patch) -> None:
    """`use_async=True` and `low_cpu_mem_mode=False` use plain memory where there is no device to pin it for.

    Without it: RuntimeError: Cannot access accelerator device when none is available. No longer needed when
    `_pin_tensor(torch.zeros(1))` returns on a machine without a GPU.
    """
    if module.get_accelerator().name != "cpu":
        return

    def _pin_tensor(tensor: torch.Tensor, empty: bool = True) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu") if empty else tensor

    patch.set(module, "_pin_tensor", _pin_tensor)


@mend(
    module="colossalai.zero.low_level.low_level_optim",
    place="zero/low_level/low_level_optim.py:811,903",
    needed_when="no CUDA or NPU device",
)
def cpu_optimizer_states_are_not_pinned(module: ModuleType, patch: Patch) -> None:
    """`save_optimizer(use_async=True)` hands over the gathered states unpinned where there is nothing to pin.

    Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend. No longer needed when
    `LowLevelZeroOptimizer.state_dict({})` returns on a machine without a GPU.
    """
    if module.get_accelerator().name != "cpu":
        return

    optimizer_class = module.LowLevelZeroOptimizer
    state_dict_upstream, state_dict_shard_upstream = (optimizer_class.state_dict, optimizer_class.state_dict_shard)

    @functools.wraps(state_dict_upstream)
    def state_dict(self, pinned_state_dicts: dict | None = None, only_on_master: bool = False) -> dict:
        return state_dict_upstream(self, None, only_on_master)

    @functools.wraps(state_dict_shard_upstream)
    def state_dict_shard(
        self, max_shard_size: int = 1024, pinned_state_dicts: dict | None = None, only_on_master: bool = False
    ) -> Iterator[tuple[dict, int]]:
        return state_dict_shard_upstream(self, max_shard_size, None, only_on_master)

    patch.set(optimizer_class, "state_dict", state_dict)
    patch.set(optimizer_class, "state_dict_shard", state_dict_shard)


@mend(
    module="colossalai.checkpoint_io.utils",
    place="checkpoint_io/utils.py:484-490",
    needed_when="weights are tied and on the CPU, and are saved with use_safetensors=True",
)
def tied_weights_are_saved_from_the_cpu(module: ModuleType, patch: Patch) -> None:
    """Weights that share memory on the CPU are saved under each of their names, as those of a GPU are.

    Without it: RuntimeError: Some tensors share memory. No longer needed when `save_state_dict` writes two names of one
    CPU tensor with `use_safetensors=True`.
    """
    save_upstream = module.save_state_dict

    @functools.wraps(save_upstream)
    def save_state_dict(state_dict: dict, checkpoint_file_path: str, use_safetensors: bool) -> None:
        if use_safetensors:
            state_dict = _without_shared_memory(state_dict)
        save_upstream(state_dict, checkpoint_file_path, use_safetensors)

    patch.set_function(module, "save_state_dict", save_state_dict)


def _without_shared_memory(state_dict: dict) -> dict:
    """The same values, where each name but the first of some CPU memory has a copy."""
    seen: set[int] = set()
    apart = {}
    for name, value in state_dict.items():
        shared = False
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and value.numel() > 0:
            memory = value.untyped_storage().data_ptr()
            shared = memory in seen
            seen.add(memory)
        apart[name] = value.detach().clone() if shared else value
    return apart


@mend(
    module="colossalai.zero.gemini.gemini_ddp",
    place="zero/gemini/gemini_ddp.py:811-817",
    needed_when="Gemini loads a checkpoint of a model with tied weights",
)
def gemini_loads_tied_weights(module: ModuleType, patch: Patch) -> None:
    """A checkpoint that has a tied weight under each of its names, as Gemini's own, loads.

    Without it: RuntimeError: Unexpected key(s) in state_dict: "lm_head.weight". No longer needed when
    `GeminiDDP._load_from_state_dict` takes each name of a parameter.
    """
    load_upstream = module.GeminiDDP._load_from_state_dict

    @functools.wraps(load_upstream)
    def _load_from_state_dict(self, state_dict: dict, *arguments) -> None:
        names = {name for name, _ in self.module.named_parameters()}
        tied = {name for name, _ in self.module.named_parameters(remove_duplicate=False)} - names
        load_upstream(self, {name: value for name, value in state_dict.items() if name not in tied}, *arguments)

    patch.set(module.GeminiDDP, "_load_from_state_dict", _load_from_state_dict)


@mend(
    module="colossalai.checkpoint_io.utils",
    place="checkpoint_io/utils.py:726-729",
    needed_when="shards that name a tied weight once, as HybridParallelPlugin's, are loaded by another plugin",
)
def shards_name_a_tied_weight_once(module: ModuleType, patch: Patch) -> None:
    """Shards that hold a tied weight under one of its names load where every name is asked for.

    Without it: RuntimeError: Missing key(s) in state_dict: "lm_head.weight". No longer needed when
    `load_state_dict_into_model(model, shard, missing, strict=True)` counts no name whose weight another name loaded.
    """
    load_upstream = module.load_state_dict_into_model

    @functools.wraps(load_upstream)
    def load_state_dict_into_model(
        model: nn.Module, state_dict: dict, missing_keys: list, strict: bool = False, load_sub_module: bool = True
    ) -> None:
        load_upstream(model, state_dict, missing_keys, strict, load_sub_module)
        if strict:
            loaded = model.base_model if isinstance(model, module.PeftUnwrapMixin) else model
            missing_keys[-1] = _of_no_loaded_weight(loaded, missing_keys[-1])

    patch.set_function(module, "load_state_dict_into_model", load_state_dict_into_model)


def _of_no_loaded_weight(model: nn.Module, missing: Sequence[str]) -> list[str]:
    """The missing names but those of a parameter that has a name which is not missing."""
    # past GeminiDDP's own, which takes no such argument
    parameters = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    absent = set(missing)
    loaded = {id(parameter) for name, parameter in parameters.items() if name not in absent}
    return [name for name in missing if name not in parameters or id(parameters[name]) not in loaded]


@mend(
    module="colossalai.checkpoint_io.hybrid_parallel_checkpoint_io",
    place="checkpoint_io/hybrid_parallel_checkpoint_io.py:384,846",
    needed_when="a pipeline loads a checkpoint that names a tied weight once, as Hugging Face's and other modes' do",
)
def pipeline_stages_load_a_weight_that_they_share(module: ModuleType, patch: Patch) -> None:
    """A stage whose name of a tied weight is not in a checkpoint takes it from the stage whose name is.

    Without it the last stage keeps the head that it had, without a word. No longer needed when a pipeline with tied
    embeddings has one value in both after `load_model` of a checkpoint without `lm_head.weight`.
    """
    io_class = module.HybridParallelCheckpointIO

    def sharing(load_upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(load_upstream)
        def load(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
            shared = _shared_between_stages(model)
            with _found([parameter for parameter, _ in shared], model.unwrap()) as found:
                load_upstream(self, model, *args, **kwargs)
            sources = [_stage_that_loaded(id(parameter) in found, group) for parameter, group in shared]
            if all(source is None for source in sources):
                return
            model._force_wait_all_gather()
            for (parameter, group), source in zip(shared, sources, strict=True):
                if source is not None:
                    value = parameter.detach().clone()
                    dist.broadcast(value, source, group=group)
                    with torch.no_grad():
                        parameter.copy_(value)
            model.update_master_params()

        return load

    for name in ("load_sharded_model", "load_unsharded_model"):
        patch.set(io_class, name, sharing(getattr(io_class, name)))


def _shared_between_stages(model: nn.Module) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
    """What this stage of a pipeline holds together with other stages, and the group of these."""
    by_stages = [by_stage for by_stage in model.shared_params if by_stage]
    return [
        (by_stage[model.stage_manager.stage], group)
        for by_stage, group in zip(by_stages, model.shared_param_process_groups, strict=True)
        if len(by_stage) > 1 and model.stage_manager.stage in by_stage
    ]


@contextmanager
def _found(parameters: Sequence[nn.Parameter], model: nn.Module) -> Iterator[set[int]]:
    """The ids of those parameters whose names are in the state dicts that are loaded meanwhile."""
    found: set[int] = set()
    wanted = {id(parameter) for parameter in parameters}

    def look(module: nn.Module, state_dict: dict, prefix: str, *_: Any) -> None:
        found.update(
            id(parameter)
            for name, parameter in module._parameters.items()
            if id(parameter) in wanted and prefix + name in state_dict
        )

    hooks = [
        module.register_load_state_dict_pre_hook(look)
        for module in model.modules()
        if any(id(parameter) in wanted for parameter in module._parameters.values())
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _stage_that_loaded(has_loaded: bool, group: dist.ProcessGroup) -> int | None:
    """The first rank of a group that has loaded a weight which another has not; None: they are alike."""
    loaded: list[bool] = [False] * dist.get_world_size(group)
    dist.all_gather_object(loaded, has_loaded, group=group)
    if any(loaded) and not all(loaded):
        return dist.get_global_rank(group, loaded.index(True))
    return None

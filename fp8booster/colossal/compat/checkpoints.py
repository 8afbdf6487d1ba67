"""Mends of saving and loading."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

import torch

from fp8booster.colossal.compat.background_writer import BackgroundFileWriter
from fp8booster.colossal.compat.registry import Patch, mend


@mend(
    module="colossalai.utils.safetensors",
    place="utils/safetensors.py:10-15",
    needed_when="tensornvme is not installed",
)
def async_save_without_tensornvme(module: ModuleType, patch: Patch) -> None:
    """`use_async=True` writes checkpoints in a thread where tensornvme is not installed.

    Without it: NameError: name 'AsyncFileWriter' is not defined. No longer needed when
    colossalai.utils.safetensors defines that name without tensornvme.
    """
    if not hasattr(module, "AsyncFileWriter"):
        patch.set(module, "AsyncFileWriter", BackgroundFileWriter)


@mend(
    module="colossalai.checkpoint_io.utils",
    place="checkpoint_io/utils.py:965-968",
    needed_when="no CUDA or NPU device",
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
    state_dict_upstream, state_dict_shard_upstream = (
        optimizer_class.state_dict,
        optimizer_class.state_dict_shard,
    )

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
        load_upstream(
            self, {name: value for name, value in state_dict.items() if name not in tied}, *arguments
        )

    patch.set(module.GeminiDDP, "_load_from_state_dict", _load_from_state_dict)

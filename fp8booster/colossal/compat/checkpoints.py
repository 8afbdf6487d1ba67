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

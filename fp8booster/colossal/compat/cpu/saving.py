"""Patches of saving and loading where no memory can be pinned, or moved to a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from fp8booster.colossal.compat.cpu.no_device import NO_DEVICE, no_device
from fp8booster.colossal.compat.registry import wrap
from fp8booster.colossal.temporarily import temporarily


@wrap("checkpoint_io.utils:_pin_tensor", "965-968", needed_when=NO_DEVICE, only_if=no_device)
def cpu_memory_is_not_pinned(upstream: Callable, tensor: torch.Tensor, empty: bool = True) -> torch.Tensor:
    """`use_async=True` and `low_cpu_mem_mode=False` use plain memory where there is no device to pin it for.

    Without it: RuntimeError: Cannot access accelerator device when none is available.
    """
    return torch.empty_like(tensor, device="cpu") if empty else tensor


_PINNED = {
    "cpu_optimizer_states_are_not_pinned": (
        "zero.low_level.low_level_optim:LowLevelZeroOptimizer.state_dict LowLevelZeroOptimizer.state_dict_shard",
        "811,903",
    ),
    "fsdp_shards_are_not_pinned": ("checkpoint_io.utils:shard_model_checkpoint shard_optimizer_checkpoint", "420,450"),
    "cpu_shards_are_not_pinned": (
        "checkpoint_io.hybrid_parallel_checkpoint_io:HybridParallelCheckpointIO._model_sharder "
        "HybridParallelCheckpointIO._optimizer_sharder",
        "118,1071",
    ),
    "gemini_states_are_not_pinned": (
        "zero.gemini:GeminiDDP.state_dict_shard GeminiOptimizer.state_shard",
        "zero/gemini/gemini_ddp.py:929,950; zero/gemini/gemini_optimizer.py:838",
    ),
}
"""By patch: what takes `pinned_state_dicts`, and where it pins."""


def _without_pinning(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """States are saved in the background (`use_async=True`) from plain memory where there is no device to pin it for.

    Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend.
    """
    given = inspect.signature(upstream).bind(*args, **kwargs)
    given.arguments.pop("pinned_state_dicts", None)
    return upstream(*given.args, **given.kwargs)


for _name, (_where, _lines) in _PINNED.items():
    wrap(_where, _lines, needed_when=NO_DEVICE, only_if=no_device, name=_name)(_without_pinning)


@wrap(
    "checkpoint_io.utils:save_state_dict",
    "484-490",
    needed_when="weights are tied and on the CPU, and are saved with use_safetensors=True",
)
def tied_weights_are_saved_from_the_cpu(
    upstream: Callable, state_dict: dict, checkpoint_file_path: str, use_safetensors: bool
) -> None:
    """Weights that share memory on the CPU are saved under each of their names, as those of a GPU are.

    Without it: RuntimeError: Some tensors share memory.
    """
    if use_safetensors:
        state_dict = _without_shared_memory(state_dict)
    upstream(state_dict, checkpoint_file_path, use_safetensors)


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


@wrap(
    "checkpoint_io.moe_checkpoint:MoECheckpointIO.gather_from_sharded_optimizer_state",
    "284",
    needed_when=NO_DEVICE,
    only_if=no_device,
)
def moe_states_are_gathered_on_cpu(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """MoECheckpointIO gathers optimizer states where they lie if there is no GPU to move them to.

    Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver).
    """
    with temporarily(torch.Tensor, cuda=lambda tensor, *_, **__: tensor):
        return upstream(*args, **kwargs)

"""Patches of Gemini, which tells the accelerator's memory from the host's by the type of a device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import time
from types import ModuleType
from typing import Any

import psutil
import torch

from fp8booster.colossal.compat.cpu.no_device import NO_DEVICE, get_accelerator, no_device
from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.compat.upstream.distributed import local_world_size


class _Stream(torch.cpu.Stream):
    """The CPU's only stream, on which all work has ended when a call returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Accelerator:
    """The CPU's accelerator, told from the host by its name and by its device's index."""

    name = "cuda"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def get_current_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def Stream(self, *args: Any, **kwargs: Any) -> _Stream:
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@patch("zero.gemini", "zero/gemini/chunk/chunk.py:201,304,329,369", needed_when=NO_DEVICE)
def gemini_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """Gemini keeps apart what lies on the accelerator and what is offloaded where both are the CPU's memory.

    It decides by the device's type. Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator
    backend, and shards that were offloaded are not found again.
    """
    if not no_device(module):
        return
    accelerator = _Accelerator(get_accelerator())
    for name, other in list(sys.modules.items()):
        if name.startswith(module.__name__) and hasattr(other, "get_accelerator"):
            replacements.set(other, "get_accelerator", lambda: accelerator)

    def construct(upstream: Callable, self: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> None:
        upstream(self, *args, pin_memory=False, **kwargs)

    def close(upstream: Callable, self: Any) -> None:
        upstream(self)
        if self.shard_device.index is not None and not self.keep_gathered:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    def move_shard(upstream: Callable, self: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        if device.index is None:
            upstream(self, device, *args, **kwargs)
        elif not self.optim_sync_flag:
            self._Chunk__paired_shard_move()
            self.optim_sync_flag = True
        elif self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard.clone(), None

    def move_chunk(
        upstream: Callable,
        self: Any,
        chunk: Any,
        device: torch.device,
        force_copy: bool = False,
        async_move: bool = False,
    ) -> None:
        on_host = chunk.device_type == "cpu"
        if chunk.can_move and on_host != (device.index is None):
            self._ChunkManager__sub_memory_usage(chunk.memory_usage)
            chunk.shard_move(device, force_copy)
            self._ChunkManager__add_memory_usage(chunk.memory_usage)

    chunks, managers = (sys.modules[f"{module.__name__}.chunk.{name}"] for name in ("chunk", "manager"))
    replacements.wrap(chunks, "Chunk.__init__", construct)
    replacements.wrap(chunks, "Chunk.close_chunk", close)
    replacements.wrap(chunks, "Chunk.shard_move", move_shard)
    replacements.wrap(managers, "ChunkManager.move_chunk", move_chunk)


@patch("zero.gemini.memory_tracer.memory_monitor", "130-148", needed_when=NO_DEVICE)
def gemini_measures_memory_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """placement_policy="auto" asks the accelerator, not CUDA, for the peak of its memory.

    Without it CUDA's absence raises.
    """
    accelerator = get_accelerator()

    def start(self) -> None:
        accelerator.reset_peak_memory_stats()

    def finish(self) -> int:
        self.time_stamps.append(time())
        self.mem_stats.append(accelerator.max_memory_allocated())
        return self.mem_stats[-1]

    if no_device(module):
        replacements.set(module.SyncCudaMemoryMonitor, "start", start)
        replacements.set(module.SyncCudaMemoryMonitor, "finish", finish)


@wrap(
    "legacy.utils.memory:colo_device_memory_capacity",
    "110",
    needed_when=NO_DEVICE,
    only_if=lambda module: module.gpc.num_processes_on_current_node == -1,
)
def memory_of_the_cpu_is_shared(upstream: Callable, device: torch.device) -> float:
    """The capacity of a rank on the CPU is its part of the machine's memory.

    Without it the number of processes is the -1 that nothing has set, and placement_policy="auto" finds that it has
    less than no memory.
    """
    return psutil.virtual_memory().total / local_world_size() if device.type == "cpu" else upstream(device)

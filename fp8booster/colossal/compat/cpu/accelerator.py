"""Patches of the CPU's accelerator: streams, random generators, memory, autocast."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

from fp8booster.colossal.compat.cpu.no_device import NO_DEVICE
from fp8booster.colossal.compat.registry import patch
from fp8booster.colossal.compat.replacements import Replacements

_ACCELERATOR = "accelerator.cpu_accelerator"
_UNSUPPORTED = "this method is not supported for cpu accelerator"


def _fill(module: ModuleType, replacements: Replacements, methods: dict[str, Callable[..., Any]]) -> None:
    """Give CpuAccelerator those `methods` that upstream leaves as a bare `raise RuntimeError`."""
    for name, function in methods.items():
        upstream = getattr(module.CpuAccelerator, name, None)
        if upstream is None or _UNSUPPORTED in upstream.__code__.co_consts:
            replacements.set(module.CpuAccelerator, name, staticmethod(function))


@patch(_ACCELERATOR, "39-73,238-272", needed_when=NO_DEVICE)
def cpu_has_streams_and_devices(module: ModuleType, replacements: Replacements) -> None:
    """CpuAccelerator offers the streams and devices that `torch.cpu` has.

    Without it ZeRO (zero/low_level/bookkeeping/bucket_store.py:22) raises RuntimeError: this method is not
    supported for cpu accelerator.
    """
    _fill(
        module,
        replacements,
        {
            "Stream": lambda device=None, priority=0, **_: torch.cpu.Stream(priority),
            "stream": torch.cpu.stream,
            "current_stream": lambda device=None: torch.cpu.current_stream(),
            "default_stream": lambda device=None: torch.cpu.current_stream(),
            "set_stream": lambda stream: None,
            "synchronize": lambda device=None: torch.cpu.synchronize(),
            "current_device": torch.cpu.current_device,
            "set_device": lambda device=None: None,
            "device_count": torch.cpu.device_count,
        },
    )


@patch(_ACCELERATOR, "102-156", needed_when=NO_DEVICE)
def cpu_has_random_generators(module: ModuleType, replacements: Replacements) -> None:
    """CpuAccelerator seeds, reads and restores the CPU's random generator.

    Without it tensor parallelism (shardformer/layer/utils.py:158-173) raises TypeError, since
    `torch.get_rng_state` takes no device, or RuntimeError from manual_seed.
    """
    try:
        module.CpuAccelerator().get_rng_state()
    except TypeError:
        get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
        replacements.set(module.CpuAccelerator, "get_rng_state", get_rng_state)
    _fill(
        module,
        replacements,
        {
            "get_rng_state_all": lambda: [torch.get_rng_state()],
            "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
            "manual_seed": torch.manual_seed,
            "manual_seed_all": torch.manual_seed,
            "seed": torch.seed,
            "seed_all": torch.seed,
            "initial_seed": torch.initial_seed,
        },
    )


@patch(_ACCELERATOR, "160-232", needed_when=NO_DEVICE)
def cpu_counts_memory(module: ModuleType, replacements: Replacements) -> None:
    """CpuAccelerator reports the resident memory of the process, now and at its peak, in bytes.

    Without it memory_allocated, empty_cache and their like raise RuntimeError.
    """
    _fill(
        module,
        replacements,
        {
            "empty_cache": lambda: None,  # the CPU allocator returns memory to the system at once
            "memory_allocated": lambda device=None: psutil.Process().memory_info().rss,
            "max_memory_allocated": lambda device=None: _peak_memory(),
            "reset_peak_memory_stats": lambda device=None: _reset_peak_memory(),
            "reset_max_memory_allocated": lambda device=None: _reset_peak_memory(),
        },
    )


def _peak_memory() -> int:
    if sys.platform == "linux":
        # ru_maxrss also counts what the parent held when it started this process, and no reset takes that away
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak_memory() -> None:
    # See proc(5): 5 resets the peak resident set size. Other systems cannot, and say so by FileNotFoundError.
    Path("/proc/self/clear_refs").write_text("5")


@patch(_ACCELERATOR, "283", needed_when=NO_DEVICE)
def cpu_autocasts(module: ModuleType, replacements: Replacements) -> None:
    """CpuAccelerator's autocast is PyTorch's.

    Without it `Booster(mixed_precision="fp16")` raises TypeError: 'ABCMeta' object does not support the context
    manager protocol.
    """

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager:
        return torch.autocast("cpu", dtype, enabled, cache_enabled)

    if isinstance(module.CpuAccelerator().autocast(), type):
        replacements.set(module.CpuAccelerator, "autocast", autocast)

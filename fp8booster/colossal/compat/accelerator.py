"""Patches of the CPU's accelerator, and of calls to CUDA: what ranks without CUDA, joined by gloo, lack."""

from __future__ import annotations

import functools
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

from fp8booster.colossal.compat.registry import Kind, Replacements, patch, wrap

NO_DEVICE = "no CUDA or NPU device"

_ACCELERATOR = "accelerator.cpu_accelerator"
_UNSUPPORTED = "this method is not supported for cpu accelerator"


def get_accelerator() -> Any:
    """Return colossalai's, once it can be imported."""
    from colossalai.accelerator import get_accelerator

    return get_accelerator()


def no_device(module: ModuleType) -> bool:
    """Tell whether Colossal-AI runs on the CPU here; for `wrap(only_if=...)`."""
    return get_accelerator().name == "cpu"


def wrap_on_cpu(where: str, lines: str, **options: Any) -> Callable:
    """Register a function as `wrap` does, for where Colossal-AI runs on the CPU."""
    return wrap(where, lines, NO_DEVICE, kind=Kind.CPU, only_if=no_device, **options)


def patch_on_cpu(module: str, lines: str) -> Callable:
    """Register a function as `patch` does, for where Colossal-AI runs on the CPU."""

    def register(repair: Callable[[ModuleType, Replacements], None]) -> None:
        def guarded(module: ModuleType, replacements: Replacements) -> None:
            if no_device(module):
                repair(module, replacements)

        patch(module, lines, NO_DEVICE, kind=Kind.CPU)(functools.update_wrapper(guarded, repair))

    return register


@patch(_ACCELERATOR, "39-73,102-156,160-232,238-272", NO_DEVICE, kind=Kind.CPU)
def cpu_accelerator_is_complete(module: ModuleType, replacements: Replacements) -> None:
    """Without it ZeRO and `memory_allocated` raise RuntimeError: this method is not supported for cpu accelerator; and
    tensor parallelism TypeError, since `torch.get_rng_state` takes no device.
    """
    accelerator = module.CpuAccelerator
    methods: dict[str, Callable[..., Any]] = {
        "Stream": lambda device=None, priority=0, **_: torch.cpu.Stream(priority),
        "stream": torch.cpu.stream,
        "current_stream": lambda device=None: torch.cpu.current_stream(),
        "default_stream": lambda device=None: torch.cpu.current_stream(),
        "set_stream": lambda stream: None,
        "synchronize": lambda device=None: torch.cpu.synchronize(),
        "current_device": torch.cpu.current_device,
        "set_device": lambda device=None: None,
        "device_count": torch.cpu.device_count,
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "seed": torch.seed,
        "seed_all": torch.seed,
        "initial_seed": torch.initial_seed,
        "empty_cache": lambda: None,  # the CPU allocator returns memory to the system at once
        "memory_allocated": lambda device=None: psutil.Process().memory_info().rss,
        "max_memory_allocated": lambda device=None: _peak_memory(),
        "reset_peak_memory_stats": lambda device=None: _reset_peak_memory(),
        "reset_max_memory_allocated": lambda device=None: _reset_peak_memory(),
    }
    for name, function in methods.items():
        upstream = getattr(accelerator, name, None)
        # only what refuses to run, so that a later colossalai's own methods are left alone
        if upstream is None or _UNSUPPORTED in upstream.__code__.co_consts:
            replacements.set(accelerator, name, staticmethod(function))
    try:
        accelerator().get_rng_state()
    except TypeError:
        replacements.set(accelerator, "get_rng_state", staticmethod(lambda device=None: torch.get_rng_state()))


def _peak_memory() -> int:
    if sys.platform == "linux":
        # ru_maxrss also counts what the parent held when it started this process, and no reset takes that away
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak_memory() -> None:
    # See proc(5): 5 resets the peak resident set size. Other systems cannot, and raise FileNotFoundError.
    Path("/proc/self/clear_refs").write_text("5")


@patch(_ACCELERATOR, "283", NO_DEVICE, kind=Kind.CPU)
def cpu_autocasts(module: ModuleType, replacements: Replacements) -> None:
    """Without it `Booster(mixed_precision="fp16")` raises TypeError: 'ABCMeta' object does not support the context
    manager protocol.
    """

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager:
        return torch.autocast("cpu", dtype, enabled, cache_enabled)

    if isinstance(module.CpuAccelerator().autocast(), type):
        replacements.set(module.CpuAccelerator, "autocast", autocast)


@wrap(
    "torch.cuda:set_device",
    "shardformer/modeling/gpt2.py:258, opt.py:208, t5.py:177",
    "no CUDA device",
    kind=Kind.CPU,
    only_if=lambda module: not module.is_available(),
)
def a_cpu_is_no_cuda_device_to_set(upstream: Callable, device: Any) -> None:
    """Without it GPT-2, OPT and T5 raise ValueError: Expected a cuda device, but got: cpu."""
    if not (isinstance(device, torch.device) and device.type == "cpu"):
        upstream(device)

"""Mends for ranks on CPU, joined by gloo."""

from __future__ import annotations

import functools
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch

_CPU_ACCELERATOR = "colossalai.accelerator.cpu_accelerator"
_UNSUPPORTED = "this method is not supported for cpu accelerator"


def _fill(module: ModuleType, patch: Patch, methods: dict[str, Callable[..., Any]]) -> None:
    """Give CpuAccelerator those `methods` that upstream leaves as a bare `raise RuntimeError`."""
    for name, function in methods.items():
        upstream = getattr(module.CpuAccelerator, name, None)
        if upstream is None or _UNSUPPORTED in upstream.__code__.co_consts:
            patch.set(module.CpuAccelerator, name, staticmethod(function))


@mend(
    module=_CPU_ACCELERATOR, place="accelerator/cpu_accelerator.py:39-73,238-272", needed_when="no CUDA or NPU device"
)
def cpu_has_streams_and_devices(module: ModuleType, patch: Patch) -> None:
    """CpuAccelerator offers the streams and devices that `torch.cpu` has.

    Without it ZeRO (zero/low_level/bookkeeping/bucket_store.py:22) raises RuntimeError: this method is not
    supported for cpu accelerator. No longer needed when CpuAccelerator().Stream() returns.
    """
    _fill(
        module,
        patch,
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


@mend(module=_CPU_ACCELERATOR, place="accelerator/cpu_accelerator.py:102-156", needed_when="no CUDA or NPU device")
def cpu_has_random_generators(module: ModuleType, patch: Patch) -> None:
    """CpuAccelerator seeds, reads and restores the CPU's random generator.

    Without it tensor parallelism (shardformer/layer/utils.py:158-173) raises TypeError, since
    `torch.get_rng_state` takes no device, or RuntimeError from manual_seed. No longer needed when
    CpuAccelerator().get_rng_state() and .manual_seed(0) return.
    """
    accelerator_class = module.CpuAccelerator
    try:
        accelerator_class().get_rng_state()
    except TypeError:
        patch.set(accelerator_class, "get_rng_state", staticmethod(lambda device=None: torch.get_rng_state()))
    _fill(
        module,
        patch,
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


@mend(module=_CPU_ACCELERATOR, place="accelerator/cpu_accelerator.py:160-232", needed_when="no CUDA or NPU device")
def cpu_counts_memory(module: ModuleType, patch: Patch) -> None:
    """CpuAccelerator reports the resident memory of the process, now and at its peak, in bytes.

    Without it memory_allocated, empty_cache and their like raise RuntimeError. No longer needed when
    CpuAccelerator().memory_allocated() returns.
    """
    _fill(
        module,
        patch,
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


@mend(
    module="colossalai.zero.low_level.low_level_optim",
    place="zero/low_level/low_level_optim.py:254",
    needed_when="no CUDA or NPU device",
)
def zero_runs_on_cpu(module: ModuleType, patch: Patch) -> None:
    """LowLevelZeroOptimizer accepts the CPU accelerator.

    Without it: AssertionError: device is required. No longer needed when a LowLevelZeroOptimizer can be made
    on a machine without a GPU.
    """
    optimizer_class = module.LowLevelZeroOptimizer
    try:
        optimizer_class._sanity_checks(SimpleNamespace(optim=SimpleNamespace(param_groups=[])))
        return
    except AssertionError:
        pass

    def _sanity_checks(self) -> None:
        for parameter in (p for group in self.optim.param_groups for p in group["params"]):
            if parameter.dtype != self._dtype and not getattr(parameter, "skip_zero_check", False):
                raise ValueError(
                    f"ZeRO needs parameters of one dtype, but got {parameter.dtype} beside {self._dtype}; "
                    "convert the model before boosting it"
                )

    patch.set(optimizer_class, "_sanity_checks", _sanity_checks)


@mend(
    module="colossalai.zero.low_level.low_level_optim",
    place="zero/low_level/low_level_optim.py:343",
    needed_when="no CUDA or NPU device",
)
def zero_overlaps_without_streams(module: ModuleType, patch: Patch) -> None:
    """overlap_communication, on by default, reduces buckets during backward on CPU too, on no side stream.

    Without it `Tensor.record_stream`, which no CPU tensor has, raises RuntimeError: unknown parameter type.
    No longer needed when stage 1 trains on CPU with overlap_communication=True.
    """
    if module.get_accelerator().name != "cpu":
        return
    upstream = module.LowLevelZeroOptimizer._run_reduction

    @functools.wraps(upstream)
    def _run_reduction(self) -> None:
        overlap, self._overlap_communication = self._overlap_communication, False
        try:
            upstream(self)
        finally:
            self._overlap_communication = overlap

    patch.set(module.LowLevelZeroOptimizer, "_run_reduction", _run_reduction)

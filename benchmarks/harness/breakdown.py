"""Divide the GPU's time in a piece of work into parts, by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, schedule

PARTS = {"products": ("gemm", "nvjet", "cutlass", "splitk"), "casts": ("amax", "cast")}
"""What the names of kernels contain; nvjet is cuBLAS's family on Hopper. All else is "other"."""


NONE_SEEN = "torch's profiler saw none; another process, such as nsys, may hold the GPU's profiler"


def kernel_us(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Microseconds on the GPU of each kernel in one run, the mean of `repeats`; empty: report `NONE_SEEN`."""
    # kernels that run while the profiler starts may be missed, so the first cycle is thrown away
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=schedule(wait=0, warmup=1, active=1)
    ) as profiler:
        run()
        torch.cuda.synchronize()
        profiler.step()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    return us_of_kernels(profiler.key_averages(), repeats)


def us_of_kernels(events: Iterable[FunctionEventAvg], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel among the events of a profile of `repeats` runs, in one of them."""
    return {
        event.key: event.self_device_time_total / repeats
        for event in events
        # compared by value: the profiler makes an object of its own for each event's type
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    }


def part_of(kernel: str) -> str:
    """Return the part that a kernel belongs to: "products", "casts" or "other"."""
    lower = kernel.lower()
    return next((part for part, marks in PARTS.items() if any(mark in lower for mark in marks)), "other")


def by_part(kernels: Mapping[str, float]) -> dict[str, float]:
    """The sum of each part."""
    sums = dict.fromkeys((*PARTS, "other"), 0.0)
    for kernel, microseconds in kernels.items():
        sums[part_of(kernel)] += microseconds
    return sums

"""Timing where all ranks must call alike: interleaved bursts, of as many calls on every rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

WARM_UP_CALLS = 3
LARGEST_BURST = 200


def time_ranks_interleaved(
    variants: Mapping[str, Callable[[], object]], *, device: torch.device, rounds: int, sample_ms: float
) -> dict[str, list[float]]:
    """Return milliseconds of a call of each variant, of the slowest rank, A B C A B C ...

    Args:
        variants: what to time.
        device: of this rank.
        rounds: samples of each variant; one round more runs first and is not counted.
        sample_ms: a burst repeats its calls until it lasts about this long.
    """
    sample = _burst_cuda if device.type == "cuda" else _burst_cpu
    bursts = {}
    for name, call in variants.items():
        for _ in range(WARM_UP_CALLS):
            call()
        ms = _slowest(sample(call, 1), device)
        bursts[name] = max(1, min(LARGEST_BURST, math.ceil(sample_ms / ms)))
    elapsed: dict[str, list[float]] = {name: [] for name in variants}
    for counted in [False] + [True] * rounds:
        for name, call in variants.items():
            ms = _slowest(sample(call, bursts[name]), device) / bursts[name]
            if counted:
                elapsed[name].append(ms)
    return elapsed


def _slowest(ms: float, device: torch.device) -> float:
    """The largest of all ranks' times, which also makes them begin the next burst together."""
    largest = torch.tensor([ms], dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def _burst_cuda(call: Callable[[], object], repeats: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()  # the burst begins where all ranks have met
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _burst_cpu(call: Callable[[], object], repeats: int) -> float:
    call()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) * 1e3

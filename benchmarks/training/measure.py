"""Measure one engine's steps: timed, counted and profiled on every rank of its own processes."""

from __future__ import annotations

import gc
import math
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.training.built_engine import STEP_RANGE, BuiltEngine
from benchmarks.training.data import batches
from benchmarks.training.job import Job
from benchmarks.training.trace import breakdown
from fp8booster import comm
from fp8booster.monitor.power import Draw, PowerMeter
from fp8booster.monitor.traffic import count_traffic
from fp8booster.training.optimizers import WarmupCosine

Outcome = dict[str, Any]
"""What one turn of an engine found; plain values for JSON, equal on all ranks but for "parts" and "wire"."""


def measure(built: BuiltEngine, job: Job, device: torch.device, trace: Path | None) -> Outcome:
    """Warm up, time the steps one by one, then count what one sends and, with `trace`, profile one.

    Every rank calls it. The first timed step begins when all ranks have met and their GPUs are done, each other where
    the last one ended. A step ends when this rank's GPU has done what the current stream holds, as in a loop that reads
    each loss; what an engine sends on other streams goes on, into the next step's time. The last step ends when the GPU
    is done with everything. So the steps add up to the time that all of them took.

    Returns:
        "step_ms": each timed step, of the slowest rank; "rank_ms": the median of each rank; "host_ms": when Python had
        launched each timed step, or waited within it, of the slowest rank; "losses": of all steps, the mean of the
        replicas; "peak_bytes" and "reserved_bytes": of the rank that needs most, while timed; "power": `_power` of the
        timed steps; "wire": `wire_of`; "replicas"; "parts": `trace.breakdown` of rank 0's profiled step, or None.
    """
    feed = batches(job, built.replica, device)
    total = job.total_steps
    schedule = WarmupCosine.over(total, job.lr)
    seconds, launched, losses = [], [], []
    began = time.perf_counter()
    with PowerMeter(device) as meter:
        for number in range(total):
            if number == job.warm_up:
                gc.collect()
                _meet(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = first = time.perf_counter()
            for group in built.optimizer.param_groups:
                group["lr"] = schedule.rate(number + 1)
            losses.append(built.step(feed(number)))
            launched.append(time.perf_counter() - began)
            if number + 1 < total:
                _finish_current_stream(device)
            else:
                _finish(device)
            ended = time.perf_counter()
            seconds.append(ended - began)
            began = ended
    peak, reserved = _memory(device)
    rank_ms, host_ms = (
        _of_all_ranks([1e3 * value for value in values[job.warm_up :]], device) for values in (seconds, launched)
    )
    tokens = feed(total)
    return {
        "step_ms": rank_ms.amax(0).tolist(),
        "rank_ms": rank_ms.median(1).values.tolist(),
        "host_ms": host_ms.amax(0).tolist(),
        "losses": _mean_losses(losses, device),
        "peak_bytes": peak,
        "reserved_bytes": reserved,
        "power": _power(meter.draw(first, ended), device),
        "replicas": built.replica.count,
        "wire": wire_of(built, tokens, device),
        "parts": None if trace is None else _profile(built, tokens, device, trace),
    }


def wire_of(built: BuiltEngine, tokens: torch.Tensor, device: torch.device) -> Outcome:
    """Bytes that leave a rank in one step.

    Returns:
        "bytes": mean over the ranks; "most": of the rank that sends most; "unseen": the part of them that was computed,
        not counted; "rows": rank 0's, by collective and dtype; "fp8": rank 0's rows of `comm.statistics`.
    """
    comm.reset_statistics()
    with count_traffic() as traffic:
        built.step(tokens)
        _finish(device)
    sent = _of_all_ranks([float(traffic.sent + built.unseen_bytes)], device)
    return {
        "bytes": sent.mean().item(),
        "most": sent.max().item(),
        "unseen": built.unseen_bytes,
        "rows": traffic.rows(),
        "fp8": [
            {"collective": name, **asdict(row), "uncompressed": dict(row.uncompressed)}
            for name, row in comm.statistics().rows.items()
        ],
    }


def _profile(built: BuiltEngine, tokens: torch.Tensor, device: torch.device, trace: Path) -> Outcome | None:
    first = dist.get_rank() == 0
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    _meet(device)
    with profile(activities=activities) if first else nullcontext() as profiler:
        # the step before it, so that it meets what that one left on the way, as the timed ones do
        built.step(tokens)
        _finish_current_stream(device)
        with record_function(STEP_RANGE):
            built.step(tokens)
            _finish_current_stream(device)
        _finish(device)
    found = None
    if first:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        found = breakdown(trace)
    dist.barrier()
    return found


def _meet(device: torch.device) -> None:
    _finish(device)
    dist.barrier()
    _finish(device)


def _finish_current_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes allocated and reserved, of the rank with most; nothing is counted on the CPU."""
    if device.type != "cuda":
        return 0, 0
    most = _of_all_ranks(
        [float(torch.cuda.max_memory_allocated()), float(torch.cuda.max_memory_reserved())], device
    ).amax(0)
    return int(most[0]), int(most[1])


def _power(draw: Draw | None, device: torch.device) -> Outcome | None:
    """Each rank's `Draw`, as a list for each of its fields; None unless all have one."""
    ranks = _of_all_ranks([math.nan] * 3 if draw is None else list(draw), device)
    return None if ranks.isnan().any() else dict(zip(Draw._fields, ranks.t().tolist(), strict=True))


def _of_all_ranks(values: list[float], device: torch.device) -> torch.Tensor:
    """float64  [ranks, values], on the CPU."""
    here = torch.tensor(values, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(here) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, here)
    return torch.stack(gathered).cpu()


def _mean_losses(losses: list[torch.Tensor | None], device: torch.device) -> list[float]:
    """The mean over the ranks that have a loss, step by step; a pipeline's last stage alone has one."""
    here = torch.zeros(2, len(losses), dtype=torch.float64, device=device)
    for step, loss in enumerate(losses):
        if loss is not None:
            here[0, step] = loss.detach()
            here[1, step] = 1
    dist.all_reduce(here)
    return (here[0] / here[1]).tolist()

"""The ranks of a benchmark that torchrun starts, and what the head of its result tells of them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.harness import command, environment
from fp8booster.cli.doctor.calls import Bench


def join(device: str, benchmark: str) -> tuple[torch.device, environment.Gpu]:
    """Join the ranks that torchrun started; return the device of this one and its facts.

    Args:
        device: cuda or cpu.
        benchmark: its name, for the sentence with which it exits with 2 where torchrun has not started it.
    """
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    target, gpu = command.measured_device(device)
    if "RANK" not in os.environ:
        command.refuse(f"start it as `torchrun --nproc-per-node 8 -m benchmarks.{benchmark}`")
    if not dist.is_initialized():
        cuda = target.type == "cuda"
        dist.init_process_group(
            "nccl" if cuda else "gloo", timeout=timedelta(minutes=2), device_id=target if cuda else None
        )
    return target, gpu


def head_of(bench: Bench, gpu: environment.Gpu, *, commit: str | None) -> dict[str, str]:
    """Return the head of a result."""
    return {
        **environment.head(gpu, commit=commit),
        "ranks": str(bench.ranks),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if bench.device.type == "cuda" else "gloo",
        "encoding": str(bench.encoding),
    }

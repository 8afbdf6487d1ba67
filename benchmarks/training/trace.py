"""Divide the time of one step, from a trace of torch's profiler: every microsecond belongs to one part."""

from __future__ import annotations

import gzip
import heapq
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Column, Record, Table
from benchmarks.training.built_engine import OPTIMIZER_RANGE, STEP_RANGE

COMMUNICATION = "communication"
OPTIMIZER = "optimizer"
POINTWISE = "norms and pointwise"
PARTS = ("products", "attention", "casts", POINTWISE, "loss", OPTIMIZER, "copies")
EXPOSED, IDLE = "exposed communication", "idle"
ROWS = (*PARTS, EXPOSED, IDLE)
"""What a step is made of: the parts, communication with nothing beside it, and time in which no kernel runs."""

_NAMES = (
    (COMMUNICATION, r"nccl|nvshmem"),
    ("attention", r"flash|fmha|sdpa|attention|attn"),
    ("products", r"gemm|nvjet|cutlass|split_?k|xmma|cublas|gemv"),
    (POINTWISE, r"triton_.*fused.*(rsqrt|silu|sigmoid)"),
    ("casts", r"amax|cast_kernel|cast_shard|(en|de)code_kernel|^(sum|unpack)_kernel|fp8|float8|e4m3|e5m2|quant"),
    ("casts", r"triton_.*fused.*clamp"),
    ("loss", r"softmax|nll_loss|cross_entropy"),
    (OPTIMIZER, r"adam|fusedoptimizer|multi_tensor_apply"),
    ("copies", r"memcpy|memset|copy_kernel|catarray"),
)
_PATTERNS = [(part, re.compile(pattern, re.IGNORECASE)) for part, pattern in _NAMES]
NOTE = (
    "Of one step on rank 0, the second of two that are profiled apart from the timed ones and begin and end as those "
    "do, in milliseconds. Kernels are told apart by name: "
    "products (cuBLAS, CUTLASS), attention (SDPA's), casts (amax, FP8 casts, encoding of what is sent), loss "
    "(softmax, negative log-likelihood), copies (memory copies and concatenation); what is left is the optimizer's "
    "if it was launched in the optimizer's step, else norms and pointwise. Where kernels run at once, the time is "
    "shared equally among their parts, and communication counts only while nothing else runs: it is exposed. So "
    "the rows add up to the step. Hidden communication runs beside computation."
)
_KERNEL_WIDTH = 90
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Kernel:
    """One piece of work on the GPU; times in microseconds."""

    name: str
    start: float
    end: float
    in_optimizer: bool = False
    """Launched in the optimizer's step."""


def part_of(name: str, *, in_optimizer: bool = False) -> str:
    """Return the part that a kernel belongs to: one of `PARTS`, or "communication"."""
    part = next((part for part, pattern in _PATTERNS if pattern.search(name)), POINTWISE)
    return OPTIMIZER if in_optimizer and part in (POINTWISE, "copies") else part


def breakdown(trace: Path) -> dict[str, Any]:
    """`attribute`, in milliseconds, and the longest kernels, of a chrome trace (gzip)."""
    with gzip.open(trace, "rt") as stream:
        events = json.load(stream)["traceEvents"]
    step = _step(events)
    kernels = within(kernels_of(events), step)
    sums: Counter[str] = Counter()
    for kernel in kernels:
        sums[kernel.name] += kernel.end - kernel.start
    return {
        "ms": {row: 1e-3 * time for row, time in attribute(kernels, step).items()},
        "longest": [{"kernel": name, "ms": 1e-3 * time, "part": part_of(name)} for name, time in sums.most_common(20)],
        "kernels": len(kernels),
    }


def _step(events: Sequence[dict[str, Any]]) -> tuple[float, float] | None:
    """Beginning and end of the measured step, in microseconds; None where the trace is of one step alone."""
    for event in events:
        if event.get("cat") == "user_annotation" and event.get("name") == STEP_RANGE:
            return event["ts"], event["ts"] + event["dur"]
    return None


def within(kernels: Sequence[Kernel], span: tuple[float, float] | None) -> list[Kernel]:
    """The kernels, or their parts, that run in a span of time; all of them without one."""
    if span is None:
        return list(kernels)
    begin, end = span
    return [
        replace(kernel, start=max(kernel.start, begin), end=min(kernel.end, end))
        for kernel in kernels
        if kernel.start < end and kernel.end > begin
    ]


def kernels_of(events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """The GPU's work in the events of a trace."""
    ranges = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event.get("name") == OPTIMIZER_RANGE
    )
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }

    def in_optimizer(event: dict[str, Any]) -> bool:
        moment = launched.get(event.get("args", {}).get("correlation"))
        if moment is None:
            return False
        index = bisect_right(ranges, (moment, float("inf"))) - 1
        return index >= 0 and moment <= ranges[index][1]

    return [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"], in_optimizer(event))
        for event in events
        if event.get("cat") in _GPU and event.get("ph") == "X"
    ]


def attribute(kernels: Sequence[Kernel], span: tuple[float, float] | None = None) -> dict[str, float]:
    """Give each moment of a span of time to what runs in it.

    Args:
        kernels: what ran; none of it outside of the span.
        span: its beginning and its end; None: from the first kernel's start to the last one's end.

    Returns:
        microseconds for each of `ROWS`, their sum as "step", and "hidden communication", which is in no other row.
    """
    sums = dict.fromkeys(ROWS, 0.0)
    hidden = 0.0
    running: Counter[str] = Counter()
    ends: list[tuple[float, str]] = []
    now = 0.0

    def advance(to: float) -> None:
        nonlocal now, hidden
        passed, now = to - now, to
        busy = [part for part in PARTS if running[part]]
        if busy:
            kernels_running = sum(running[part] for part in busy)
            for part in busy:
                sums[part] += passed * running[part] / kernels_running
            if running[COMMUNICATION]:
                hidden += passed
        else:
            sums[EXPOSED if running[COMMUNICATION] else IDLE] += passed

    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    if span is not None:
        now = span[0]
    elif ordered:
        now = ordered[0].start
    for kernel in ordered:
        while ends and ends[0][0] <= kernel.start:
            end, part = heapq.heappop(ends)
            advance(end)
            running[part] -= 1
        advance(kernel.start)
        part = part_of(kernel.name, in_optimizer=kernel.in_optimizer)
        running[part] += 1
        heapq.heappush(ends, (kernel.end, part))
    while ends:
        end, part = heapq.heappop(ends)
        advance(end)
        running[part] -= 1
    if span is not None:
        advance(span[1])
    return sums | {"step": sum(sums.values()), "hidden communication": hidden}


def profile_tables(profiles: Mapping[str, Record]) -> list[Table]:
    """Show the time of each part, a column for each profile, and the longest kernels of each.

    Args:
        profiles: what `breakdown` found, by the name of what was profiled; those without kernels are left out.
    """
    profiles = {name: each for name, each in profiles.items() if each["kernels"]}
    if not profiles:
        return []
    parts = [
        {"part": row, "ms": {name: each["ms"][row] for name, each in profiles.items()}}
        for row in (*ROWS, "step", "hidden communication")
    ]
    return [
        Table(
            "profile",
            "Where a step's time goes",
            [
                Column("part", lambda r: r["part"]),
                *(Column(name, lambda r, name=name: f"{r['ms'][name]:.1f}") for name in profiles),
            ],
            parts,
            NOTE,
        ),
        Table(
            "kernels",
            "The longest kernels",
            [
                Column("profile", lambda r: r["label"]),
                Column("kernel", lambda r: f"`{r['kernel'][:_KERNEL_WIDTH].replace('|', '/')}`"),
                Column("part", lambda r: r["part"]),
                Column("ms", lambda r: f"{r['ms']:.2f}"),
            ],
            [{"label": name, **kernel} for name, each in profiles.items() for kernel in each["longest"]],
            "All calls of a step together. Work that runs at once counts in full here.",
        ),
    ]

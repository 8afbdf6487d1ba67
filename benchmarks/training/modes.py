"""The parallel modes of `benchmarks.modes`: the job of each, its record and the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness.results import Column, Record, Table, spread
from benchmarks.training.job import MOE, Job
from benchmarks.training.records import Setting, engine_records, loss_records
from benchmarks.training.rounds import Findings
from fp8booster.training.parallel import PLUGINS

BF16, FP8 = "fp8booster-bf16", "fp8booster-fp8"

_PIPELINE = {"plugin": "hybrid", "zero": 1, "pp": 2, "micro_batches": 4}
MODES: dict[str, dict[str, Any]] = {
    "zero": {"plugin": "low_level_zero"},
    "tp": {"plugin": "hybrid", "zero": 1, "tp": 2},
    "tp-split_gather": {"plugin": "hybrid", "zero": 1, "tp": 2, "sp_mode": "split_gather"},
    "tp-ring": {"plugin": "hybrid", "zero": 1, "tp": 2, "sp_mode": "ring"},
    "sp-all_to_all": {"plugin": "hybrid", "zero": 1, "sp": 2, "sp_mode": "all_to_all"},
    "sp-ring_attn": {"plugin": "hybrid", "zero": 1, "sp": 2, "sp_mode": "ring_attn"},
    "pp": _PIPELINE,
    "pp-interleaved": _PIPELINE | {"plugin_options": ("pp_style=interleaved",)},
    "pp-zbv": _PIPELINE | {"plugin_options": ("pp_style=zbv",)},
    "tp-pp": _PIPELINE | {"tp": 2},
    "gemini": {"plugin": "gemini"},
    "gemini-tp": {"plugin": "gemini", "tp": 2},
    "ddp": {"plugin": "ddp"},
    "fsdp": {"plugin": "fsdp"},
    "moe": {"plugin": MOE},
}
"""Name: what its job changes."""

NOTE = (
    "Sequences of random tokens, `--micro-batch` of them a rank and micro-batch. A step is forward, backward, "
    "clipping and AdamW. BF16 is the same plugin with `use_fp8` off, which is Colossal-AI's step; FP8 is with "
    "fused decoder layers, loss and AdamW, the default, so the ratio holds all gains. Median [10th-90th "
    "percentile] of the slowest rank's timed steps; the ratio is of tokens a second, interleaved. The host's "
    "time ends when Python has launched a step in FP8, or has waited within it: where it is near the step's, "
    "the GPU may wait for Python. The modes do different work in a step, so their rows do not compare."
)


def why_not(name: str, ranks: int) -> str | None:
    """Return the reason why so many ranks cannot run a mode, or None."""
    changes = MODES[name]
    group = math.prod(changes.get(size, 1) for size in ("tp", "pp", "sp"))
    return f"it needs a multiple of {group} ranks, and there are {ranks}" if ranks % group else None


def job_of(name: str, base: Job, mixture: str, ranks: int) -> Job:
    """A mode's job.

    Args:
        base: what the modes share; ranks that hold a sequence together take as many more of its sequences.
        mixture: the model of "moe", with all its layers.
    """
    changes = MODES[name]
    if changes["plugin"] == MOE:
        job = replace(base, **changes, model=mixture, layers=None)
        return replace(job, ep=math.gcd(ranks, job.architecture.experts))
    holders = changes.get("tp", 1) * changes.get("sp", 1)
    return replace(base, **changes, micro_batch=base.micro_batch * holders)


def mode_record(name: str, findings: Mapping[str, Findings], base: Job, fp8: Setting) -> Record:
    """Record what a mode's turns have found so far.

    Args:
        name: of the mode.
        findings: of `BF16` and `FP8`.
        base: what the modes share.
        fp8: the job in FP8, and where it ran.
    """
    job = fp8.job
    engines = {record["engine"]: record for record in engine_records(findings, fp8, BF16)}
    losses = {record["engine"]: record["losses"] for record in loss_records(findings, BF16)}
    return {
        "mode": name,
        "label": _label(job, fp8.ranks),
        "options": _options(job, base),
        "failed": {engine: record["failed"] for engine, record in engines.items() if record["failed"]},
        "engines": engines,
        "losses": losses,
        "speed": engines[FP8]["over_baseline"],
    }


def mode_table(records: Sequence[Record]) -> Table:
    """One row for each mode."""
    return Table(
        "modes",
        "FP8 compared with BF16",
        [
            Column("mode", lambda r: r["label"]),
            Column("options", lambda r: f"`{r['options']}`" if r["options"] else ""),
            Column("BF16 ms", lambda r: _of(r, BF16, lambda e: spread(e["ms"], 1))),
            Column("FP8 ms", lambda r: _of(r, FP8, lambda e: spread(e["ms"], 1))),
            Column("FP8 over BF16", lambda r: f"{r['speed']['median']:.2f}" if r["speed"] else "-"),
            Column("FP8 tokens/s/GPU", lambda r: _of(r, FP8, lambda e: f"{e['tokens_per_second_per_gpu']:.0f}")),
            Column("FP8 host ms", lambda r: _of(r, FP8, lambda e: spread(e["host_ms"], 1))),
            Column("peak GiB BF16, FP8", lambda r: ", ".join(_of(r, name, _gib) for name in (BF16, FP8))),
            Column("wire bytes, FP8 of BF16", _wire),
        ],
        records,
        NOTE,
    )


def layer_table(records: Sequence[Record]) -> Table:
    """Show what ran in FP8 in each mode, and its loss."""
    return Table(
        None,
        "What ran in FP8",
        [
            Column("mode", lambda r: r["label"]),
            Column("linear layers", lambda r: _of(r, FP8, lambda e: e["layers"] or "-")),
            Column("fused", lambda r: _of(r, FP8, lambda e: e["fused"] or "-")),
            Column("steps", lambda r: str(len(r["losses"][FP8])) if FP8 in r["losses"] else "-"),
            Column("loss, first to last", _loss),
        ],
        records,
    )


def _label(job: Job, ranks: int) -> str:
    parts = [PLUGINS[job.plugin]]
    parts += [f"{size}_size={getattr(job, size)}" for size in ("tp", "pp", "sp", "ep") if getattr(job, size) > 1]
    if job.sp_mode is not None:
        parts.append(job.sp_mode)
    parts += [option.removeprefix("pp_style=") for option in job.plugin_options]
    if job.zero is not None:
        parts.append(f"ZeRO {job.zero}")
    if job.pp > 1:
        parts.append(f"{job.micro_batches} micro-batches")
    group = job.tp * job.pp * job.sp
    if 1 < group < ranks:
        parts.append(f"{ranks // group} replicas")
    if job.plugin == MOE:
        parts.append(f"{job.architecture.label}, {job.architecture.layers} layers")
    return ", ".join(parts)


def _options(job: Job, base: Job) -> str:
    """Those that `benchmarks.llama` takes for the mode."""
    names = ("model", "plugin", "zero", "tp", "pp", "sp", "ep", "sp_mode", "micro_batch", "micro_batches")
    changed = [
        f"--{name.replace('_', '-')} {getattr(job, name)}"
        for name in names
        if getattr(job, name) != getattr(base, name)
    ]
    return " ".join([*changed, *(f"--plugin-option {option}" for option in job.plugin_options)])


def _of(record: Record, engine: str, show: Any) -> str:
    """Return the columns of an engine that was measured."""
    found = record["engines"][engine]
    return show(found) if "ms" in found else "-"


def _gib(engine: Record) -> str:
    return f"{engine['peak_bytes'] / 2**30:.1f}" if engine["peak_bytes"] else "-"


def _wire(record: Record) -> str:
    sent = [record["engines"][name].get("wire") for name in (BF16, FP8)]
    if None in sent or not sent[0]["bytes"]:
        return "-"
    return f"{sent[1]['bytes'] / sent[0]['bytes']:.2f}"


def _loss(record: Record) -> str:
    losses = record["losses"].get(FP8)
    return f"{losses[0]:.4f} to {losses[-1]:.4f}" if losses else "-"

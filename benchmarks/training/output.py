"""The result of a run: what is shown, and the files that are written."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console

from benchmarks.harness import environment
from benchmarks.harness.plots import plot_bars
from benchmarks.harness.results import Result
from benchmarks.training.job import Job
from benchmarks.training.records import Setting, engine_records, loss_records
from benchmarks.training.rounds import Findings
from benchmarks.training.tables import loss_table, power_table, step_table, why_no_power, wire_tables
from benchmarks.training.trace import profile_tables


@dataclass(frozen=True)
class Output:
    """The files that a result is written to."""

    folder: Path | None
    json_file: Path | None
    commit: str | None


def deliver(findings: dict[str, Findings], setting: Setting, baseline: str, output: Output, *, shown: bool) -> None:
    """Write everything, and show the main tables where that is wanted."""
    job = setting.job
    records = engine_records(findings, setting, baseline)
    reference = "fp8booster-bf16" if "fp8booster-bf16" in findings else baseline
    tables = [
        step_table(records, baseline),
        *([power] if (power := power_table(records)) else []),
        *profile_tables({record["label"]: record["profile"] for record in records if record.get("profile")}),
        loss_table(loss_records(findings, reference), reference),
        *wire_tables(records),
    ]
    head = head_of(setting, output) | {"training": describe(job)}
    head |= {f"in FP8, {record['label']}": record["layers"] for record in records if record.get("layers")}
    head |= {f"fused, {record['label']}": record["fused"] for record in records if record.get("fused")}
    if job.device == "cuda" and (unknown := why_no_power(records)):
        head["clocks and power"] = unknown
    title = f"{job.architecture.label}, {job.architecture.layers} layers, trained on {setting.place}"
    result = Result(
        f"llama-{job.model}-{setting.ranks}",
        title,
        head,
        tables,
        {record["label"]: record["failed"] for record in records if record["failed"] is not None},
    )
    measured = [record for record in records if "ms" in record]
    if output.folder is not None and measured:
        name = f"{result.stem}.png"
        plot_bars(
            output.folder / name,
            title=title,
            y_label="tokens/s/GPU",
            values={record["label"]: record["tokens_per_second_per_gpu"] for record in measured},
            captions={record["label"]: _caption(record, baseline) for record in measured},
        )
        result = replace(result, plots=[name])
    written = result.write(folder=output.folder, json_file=output.json_file)
    if shown:
        show(result, written)


def head_of(setting: Setting, output: Output) -> dict[str, str]:
    """Describe the machine and the versions of a result."""
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if setting.job.device == "cuda" else "gloo"
    return environment.head(setting.gpu, commit=output.commit) | {"ranks": str(setting.ranks), "NCCL": nccl}


def show(result: Result, written: Iterable[Path]) -> None:
    """Print the first three tables, in full width where the output is no terminal, and name the files."""
    console = Console() if sys.stdout.isatty() else Console(width=240)
    for table in result.tables[:3]:
        console.print(table.rich())
    for name, reason in result.left_out.items():
        console.print(f"Left out: {name}: {reason}", markup=False)
    for path in written:
        typer.echo(f"wrote {path}", err=True)


def _caption(record: dict[str, Any], baseline: str) -> str:
    number = f"{record['tokens_per_second_per_gpu']:.0f}"
    if record["over_baseline"] is None or record["engine"] == baseline:
        return number
    return f"{number}\n{100 * (record['over_baseline']['median'] - 1):+.0f} %"


_NOT_TRAINING = ("tokens", "kinds", "forwards", "device", "layers", "steps", "warm_up")
"""Fields of a job that are told otherwise, or by its command: weights are run in other ways after the training."""


def describe(job: Job) -> str:
    """Describe the training for the head: equal for runs that differ in the number of GPUs alone."""
    shown = {
        key: value
        for key, value in job.as_record().items()
        if value not in (None, (), False) and key not in _NOT_TRAINING
    }
    text = "random tokens" if job.tokens is None else f"text of {Path(job.tokens.name).name}"
    shown["layers"] = job.architecture.layers
    return ", ".join(f"{key} {value}" for key, value in shown.items()) + f", {text}"


def gpu_facts(device: str) -> environment.Gpu:
    """Return facts about the first GPU, asked in a process that ends, so that this one holds no memory there."""
    if device == "cpu":
        return environment.gpu_of(torch.device("cpu"))
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(environment.gpu_of, torch.device("cuda", 0)).result()

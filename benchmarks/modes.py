"""Time each parallel mode in FP8, compared with the same plugin in BF16: one table.

    python -m benchmarks.modes --out results                              # on all GPUs of the machine
    python -m benchmarks.modes --only tp --only pp-zbv --processes 2 --out results
    torchrun --nproc-per-node 8 -m benchmarks.modes --json results/modes.json

Started without torchrun, it starts itself under it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import command
from benchmarks.harness.results import Record, Result
from benchmarks.training.engines import ENGINES
from benchmarks.training.job import Job
from benchmarks.training.launch import Crew, Turn, is_launched, start_torchrun
from benchmarks.training.modes import BF16, FP8, MODES, job_of, layer_table, mode_record, mode_table, why_not
from benchmarks.training.output import Output, gpu_facts, head_of, show
from benchmarks.training.records import Setting
from benchmarks.training.rounds import Findings, take_rounds
from fp8booster.cli.train.key_values import fp8_config

EVERY: list[str] = []


def main(
    context: typer.Context,
    only: Annotated[list[str], typer.Option(help=f"{', '.join(MODES)} (default: all); repeat the option.")] = EVERY,
    model: Annotated[str, typer.Option(help="Of all modes but moe, as `benchmarks.llama --model`.")] = "7b",
    layers: Annotated[int, typer.Option(help="Its layers; zero-bubble needs a multiple of 4.")] = 4,
    mixture: Annotated[str, typer.Option(help="The model of moe, with all its layers.")] = "mixtral-1b",
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences a rank takes at once.")] = 2,
    steps: Annotated[int, typer.Option(help="Steps in FP8 that are timed.")] = 100,
    bf16_steps: Annotated[int, typer.Option(help="Steps in BF16 that are timed.")] = 30,
    warm_up: Annotated[int, typer.Option(help="Steps that are not timed.")] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of BF16 and of FP8 in each mode.")] = 1,
    limit: Annotated[float, typer.Option(help="Seconds after which a turn has failed.")] = 300.0,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config; repeat the option.")] = EVERY,
    processes: Annotated[
        int | None, typer.Option(help="Processes, when not under torchrun (default: one a GPU).")
    ] = None,
    engine_logs: Annotated[Path | None, typer.Option(help="Folder for what the engines print.")] = None,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Train in every parallel mode, in FP8 and in BF16."""
    command.require_gpus(device)
    chosen = only or list(MODES)
    try:
        if unknown := next((name for name in chosen if name not in MODES), None):
            raise ValueError(f"no mode is called {unknown!r}; --only takes {', '.join(MODES)}")
        base = Job.from_options(context.params)
        fp8_config(base.fp8_options)
        for name in chosen:
            job_of(name, base, mixture, ranks=1)  # what cannot be, before any process
    except (TypeError, ValueError) as error:
        command.refuse(str(error))
    if not is_launched():
        raise typer.Exit(start_torchrun("benchmarks.modes", sys.argv[1:], processes=processes, device=device))
    crew = Crew()
    output = Output(out, json, commit)
    records = measure_modes(crew, base, chosen, mixture, bf16_steps, rounds, limit, engine_logs, output)
    crew.close()
    raise typer.Exit(0 if any(record["speed"] for record in records.values()) or crew.rank > 0 else 1)


def measure_modes(
    crew: Crew,
    base: Job,
    names: Sequence[str],
    mixture: str,
    bf16_steps: int,
    rounds: int,
    limit: float,
    logs: Path | None,
    output: Output,
) -> dict[str, Record]:
    """Give FP8 and BF16 their turns in each mode; rank 0 writes the result after each turn, and has the records."""
    first = crew.rank == 0
    console = Console(stderr=True, highlight=False, quiet=not first)
    setting = Setting(base, crew.size, gpu_facts(base.device) if first else None)
    left_out = {name: reason for name in names if (reason := why_not(name, crew.size)) is not None}
    records: dict[str, Record] = {}

    def take(name: str, job: Job) -> None:
        def turn(_: int, engine: str) -> Turn:
            console.print(f"{name}: {ENGINES[engine].label}")
            timed = job if engine == FP8 else replace(job, steps=bf16_steps)
            taken = crew.take_turn(
                {"engine": engine, "job": timed.as_record(), "trace": None}, limit_s=limit, log=logs and logs / name
            )
            if taken.outcome is None:
                console.print(f"  failed: {taken.reason}", markup=False)
            return taken

        def after_turn(findings: dict[str, Findings], _: bool) -> None:
            if first:
                records[name] = mode_record(name, findings, base, replace(setting, job=job))
                write(records, left_out, setting, output)

        take_rounds([FP8, BF16], rounds=rounds, missing={}, turn=turn, after_turn=after_turn)

    for name in names:
        if name not in left_out:
            take(name, job_of(name, base, mixture, crew.size))
    if first:
        result, written = write(records, left_out, setting, output)
        show(result, written)
    return records


def write(
    records: dict[str, Record], left_out: dict[str, str], setting: Setting, output: Output
) -> tuple[Result, list[Path]]:
    """Write the result so far; returns it and its files."""
    model = setting.job.architecture
    failed = {
        f"{name}, {ENGINES[engine].label}": reason
        for name, record in records.items()
        for engine, reason in record["failed"].items()
    }
    result = Result(
        f"modes-{setting.ranks}",
        f"Modes of fp8booster on {setting.place}, {model.label} with {model.layers} layers",
        head_of(setting, output),
        [mode_table(list(records.values())), layer_table(list(records.values()))],
        left_out | failed,
    )
    return result, result.write(folder=output.folder, json_file=output.json_file)


if __name__ == "__main__":
    command.run_command(main)

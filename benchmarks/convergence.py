"""Whether FP8 learns as BF16 does: the loss of both on the same text, over several seeds.

    python -m benchmarks.convergence --model 7b --layers 8 --data corpus.txt --seeds 4 --processes 1 --out results
    python -m benchmarks.convergence --model 7b --data corpus.txt --also gradient_format=e4m3 --out results
    python -m benchmarks.convergence join seed-0.json seed-1.json --out results

One pair of runs does not tell what rounding costs from chance: two runs in BF16 that round differently part too. So
each seed, of weights and of the order of the text, has a run of each variant, and BF16 two: as Colossal-AI rounds, and
with the fused blocks that FP8 has. Started without torchrun, it starts itself under it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import command, environment
from benchmarks.harness.results import Result
from benchmarks.training.convergence import BF16, course_table, end_table, plot, read_runs
from benchmarks.training.data import tokens_of
from benchmarks.training.job import Job
from benchmarks.training.launch import Crew, is_launched, start_torchrun
from benchmarks.training.output import Output, describe, gpu_facts, head_of, show
from benchmarks.training.records import Setting, place_of
from fp8booster.cli.train.key_values import fp8_config

NONE: list[str] = []
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, invoke_without_command=True)


@app.callback()
def main(
    context: typer.Context,
    data: Annotated[str, typer.Option(help="Text to train on, as `fp8booster train --data`, or python.")] = "python",
    text_column: Annotated[str, typer.Option(help="Column with the text in tables.")] = "text",
    model: Annotated[str, typer.Option(help="As `benchmarks.llama --model`.")] = "7b",
    layers: Annotated[int | None, typer.Option(help="Layers, where not as many as the model has.")] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences a rank takes at once.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
    lr: Annotated[float, typer.Option(help="Highest learning rate; a tenth of the steps lead up to it.")] = 1e-4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    first_seed: Annotated[int, typer.Option(help="The first seed; the others follow it.")] = 0,
    also: Annotated[list[str], typer.Option(help="key=value for FP8Config of one variant more; repeat it.")] = NONE,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config of all; repeat the option.")] = NONE,
    limit: Annotated[float, typer.Option(help="Seconds after which a run has failed.")] = 3600.0,
    processes: Annotated[
        int | None, typer.Option(help="Processes, when not under torchrun (default: one a GPU).")
    ] = None,
    engine_logs: Annotated[Path | None, typer.Option(help="Folder for what the engines print.")] = None,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Train in FP8 and in BF16 by LowLevelZero, with several seeds, and compare the losses."""
    if context.invoked_subcommand is not None:
        return
    command.require_gpus(device)
    try:
        base = Job.from_options(context.params, warm_up=0)
        if wrong := next((option for option in also if "=" not in option), None):
            raise ValueError(f"--also {wrong!r} has no '='; write it as key=value")
        for options in ((), *((option,) for option in also)):
            fp8_config((*base.fp8_options, *options))
    except (TypeError, ValueError) as error:
        command.refuse(str(error))
    if not is_launched():
        raise typer.Exit(start_torchrun("benchmarks.convergence", sys.argv[1:], processes=processes, device=device))
    variants = {
        BF16: ("fp8booster-bf16", base),
        "BF16, fused blocks": ("fp8booster-bf16-fused", base),
        "FP8": ("fp8booster-fp8", base),
        **{
            f"FP8, {option}": ("fp8booster-fp8", replace(base, fp8_options=(*base.fp8_options, option)))
            for option in also
        },
    }
    crew = Crew()
    tokens = tokens_of(data, text_column, base)
    variants = {name: (engine, replace(job, tokens=tokens)) for name, (engine, job) in variants.items()}
    losses = learn(crew, variants, range(first_seed, first_seed + seeds), limit, engine_logs, Output(out, json, commit))
    crew.close()
    raise typer.Exit(0 if losses else 1)


def learn(
    crew: Crew,
    variants: dict[str, tuple[str, Job]],
    seeds: Sequence[int],
    limit: float,
    logs: Path | None,
    output: Output,
) -> dict[int, dict[str, list[float]]]:
    """Train every variant with every seed; rank 0 writes the result after each run, and shows it at the end."""
    first = crew.rank == 0
    console = Console(stderr=True, highlight=False, quiet=not first)
    job = next(iter(variants.values()))[1]
    setting = Setting(job, crew.size, gpu_facts(job.device) if first else None)
    losses: dict[int, dict[str, list[float]]] = {}
    left_out: dict[str, str] = {}
    for seed in seeds:
        for name, (engine, of_variant) in variants.items():
            console.print(f"seed {seed}: {name}")
            task = {"engine": engine, "job": replace(of_variant, seed=seed).as_record(), "trace": None}
            taken = crew.take_turn(task, limit_s=limit, log=logs)
            reason = taken.reason
            if taken.outcome is not None and not all(map(math.isfinite, taken.outcome["losses"])):
                reason = "its loss is not finite"
            if reason is None:
                losses.setdefault(seed, {})[name] = taken.outcome["losses"]
            else:
                left_out[f"seed {seed}, {name}"] = reason
                console.print(f"  failed: {reason}", markup=False)
            if first:
                result, written = write(losses, seeds, list(variants), left_out, setting, output)
    if first:
        show(result, written)
    return losses


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json wrote.")],
    json: command.JsonFile = None,
    out: command.Folder = None,
) -> None:
    """Put together the results of runs with different seeds, such as on different GPUs."""
    try:
        losses, variants, runs = read_runs(files)
    except ValueError as error:
        command.refuse(str(error))
    head = runs[0]["head"] | {"command": environment.command_line()}
    head["command of the first run"] = runs[0]["head"]["command"]
    head["dates"] = ", ".join(run["head"]["date"] for run in runs)
    left_out = {name: reason for run in runs for name, reason in run["left_out"].items()}
    title = f"Losses of {len(losses)} seeds, each on {place_of(int(head['ranks']), on_gpus=head['GPU'] != 'CPU')}"
    result, written = deliver(
        f"{runs[0]['benchmark'].partition('-seeds-')[0]}-joined", title, head, losses, variants, left_out, out, json
    )
    show(result, written)


def write(
    losses: dict[int, dict[str, list[float]]],
    seeds: Sequence[int],
    variants: list[str],
    left_out: dict[str, str],
    setting: Setting,
    output: Output,
) -> tuple[Result, list[Path]]:
    """Write the result so far, under the name that it has when all seeds are done; returns it and its files."""
    job = setting.job
    title = f"{job.steps} steps of {job.architecture.label}, {job.architecture.layers} layers, on {setting.place}"
    head = head_of(setting, output) | {"training": f"{describe(job)}, {job.steps} steps"}
    name = f"convergence-{job.model}-{setting.ranks}-seeds-{'-'.join(map(str, seeds))}"
    return deliver(name, title, head, losses, variants, left_out, output.folder, output.json_file)


def deliver(
    name: str,
    title: str,
    head: dict[str, str],
    losses: dict[int, dict[str, list[float]]],
    variants: list[str],
    left_out: dict[str, str],
    folder: Path | None,
    json_file: Path | None,
) -> tuple[Result, list[Path]]:
    """Write tables and plot; returns the result and its files."""
    tables = [end_table(losses, variants), course_table(losses, variants)]
    result = Result(name, title, head, tables, left_out)
    if folder is not None:
        image = f"{result.stem}.png"
        if plot(folder / image, losses, variants, title):
            result = replace(result, plots=[image])
    return result, result.write(folder=folder, json_file=json_file)


if __name__ == "__main__":
    app()

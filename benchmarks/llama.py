"""Time training steps of language models: fp8booster compared with Colossal-AI's plugins, FSDP2 and torchao, in one
run.

    python -m benchmarks.llama --model 7b --against colossal-low_level_zero --against torchao --out results
    torchrun --nproc-per-node 8 -m benchmarks.llama --model 7b --profile --out results
    python -m benchmarks.llama --model 7b --precision all
    python -m benchmarks.llama --model mixtral-1b --plugin moe --ep 2 --processes 2
    python -m benchmarks.llama --model 7b --precision plain --optimizer adamw-8bit --processes 1
    python -m benchmarks.llama --model 7b --precision plain --lora 16 --against peft-lora --processes 1
    python -m benchmarks.llama --one-layer
    python -m benchmarks.llama --one-layer --host-alone --model micro --micro-batch 1 --sequence 32
    python -m benchmarks.llama scaling 1.json 2.json 4.json 8.json

Started without torchrun, it starts itself under it on the GPUs of this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.harness import command, environment
from benchmarks.harness.calls import idle_gpu
from benchmarks.harness.results import Result
from benchmarks.training.data import tokens_of
from benchmarks.training.engines import ENGINES, PEERS, PRECISIONS, chosen
from benchmarks.training.job import Job
from benchmarks.training.launch import Crew, Turn, is_launched, start_torchrun
from benchmarks.training.output import Output, deliver, gpu_facts, show
from benchmarks.training.records import Setting
from benchmarks.training.rounds import Findings, take_rounds
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.training.models import MODELS
from fp8booster.training.optimizers import OPTIMIZERS
from fp8booster.training.parallel import PLUGINS

NONE: list[str] = []
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, invoke_without_command=True)


@app.callback()
def main(
    context: typer.Context,
    model: Annotated[str, typer.Option(help=f"{', '.join(MODELS)}.")] = "7b",
    layers: Annotated[int | None, typer.Option(help="Layers, where not as many as the model has.")] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences a replica takes at once.")] = 2,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step: accumulated, or piped.")] = 1,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in backward.")] = False,
    checkpointed_layers: Annotated[
        int | None, typer.Option(help="With --checkpointing: of the first so many layers (default: all).")
    ] = None,
    plugin: Annotated[str, typer.Option(help=f"fp8booster's: {', '.join(PLUGINS)}.")] = "low_level_zero",
    zero: Annotated[int | None, typer.Option(help="ZeRO stage (default: 2; hybrid 1).")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    sp: Annotated[int, typer.Option(help="Sequence parallel ranks of their own.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert parallel ranks, of --plugin moe.")] = 1,
    sp_mode: Annotated[
        str | None, typer.Option(help="split_gather, ring, all_to_all or ring_attn (default: none).")
    ] = None,
    lazy: Annotated[bool, typer.Option(help="Make weights where they are sharded.")] = False,
    plugin_option: Annotated[
        list[str], typer.Option(help="key=value for the plugin, ours and Colossal-AI's; repeat the option.")
    ] = NONE,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config; repeat the option.")] = NONE,
    optimizer: Annotated[str, typer.Option(help=f"fp8booster's: {', '.join(OPTIMIZERS)}.")] = "adamw",
    update_in_backward: Annotated[
        bool, typer.Option("--update-in-backward", help="With adamw-8bit: keep no gradients, nor clip them.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(help="Rank of adapters, which alone train, on all linear layers of a frozen model.")
    ] = None,
    record: Annotated[
        int, typer.Option(help="Sample what FP8 does to each tensor every so many steps (default: never).")
    ] = 0,
    precision: Annotated[
        str,
        typer.Option(
            help=f"fp8booster's: {', '.join(PRECISIONS)}; bf16-fused has FP8's fused blocks, plain has no plugin."
        ),
    ] = "both",
    against: Annotated[list[str], typer.Option(help=f"Peers: {', '.join(PEERS)}, or all; repeat the option.")] = NONE,
    baseline: Annotated[str | None, typer.Option(help="The engine that ratios are over (default: the first).")] = None,
    warm_up: Annotated[int, typer.Option(help="Steps that are not timed.")] = 4,
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each engine.")] = 2,
    limit: Annotated[float, typer.Option(help="Seconds after which a turn has failed.")] = 900.0,
    data: Annotated[
        str | None,
        typer.Option(help="Text to train on, as `fp8booster train --data`, or python (default: random tokens)."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column with the text in tables.")] = "text",
    lr: Annotated[float, typer.Option(help="Highest learning rate; a tenth of the steps lead up to it.")] = 1e-4,
    seed: Annotated[int, typer.Option(help="Seed of weights and tokens.")] = 0,
    profile: Annotated[
        bool, typer.Option("--profile", help="Profile a step of each engine: a trace, and where time goes.")
    ] = False,
    one_layer: Annotated[
        bool, typer.Option("--one-layer", help="One decoder layer on one GPU instead of training.")
    ] = False,
    host_alone: Annotated[
        bool, typer.Option("--host-alone", help="With --one-layer: time the host, without a GPU; launches do nothing.")
    ] = False,
    sample_ms: Annotated[float, typer.Option(help="With --one-layer: what a sample lasts at least.")] = 200.0,
    # torchrun would take --nproc and --logs, though they come after the module, for short forms of its own options
    processes: Annotated[
        int | None, typer.Option(help="Processes, when not under torchrun (default: one a GPU).")
    ] = None,
    engine_logs: Annotated[Path | None, typer.Option(help="Folder for what the engines print.")] = None,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time training steps of fp8booster and its peers, interleaved."""
    if context.invoked_subcommand is not None:
        return
    if host_alone and not one_layer:
        command.refuse("--host-alone is about one decoder layer; add --one-layer")
    device = context.params["device"] = "cpu" if host_alone else device
    command.require_gpus(device)
    try:
        job = Job.from_options(context.params)
        engines = chosen(precision, against, lora=job.lora is not None)
        baseline = baseline or engines[0]
        if baseline not in engines:
            raise ValueError(f"--baseline is {baseline!r}; it must be measured: one of {', '.join(engines)}")
    except ValueError as error:
        command.refuse(str(error))
    output = Output(out, json, commit)
    if one_layer:
        measure_one_layer(job, rounds=rounds, sample_ms=sample_ms, host_alone=host_alone, output=output)
        return
    if not is_launched():
        raise typer.Exit(start_torchrun("benchmarks.llama", sys.argv[1:], processes=processes, device=device))
    crew = Crew()
    if data is not None:
        job = replace(job, tokens=tokens_of(data, text_column, job))
    findings = compare(crew, job, engines, rounds, limit, baseline, profile, engine_logs, output)
    crew.close()
    raise typer.Exit(0 if any(found.outcomes for found in findings.values()) else 1)


def compare(
    crew: Crew,
    job: Job,
    engines: Sequence[str],
    rounds: int,
    limit: float,
    baseline: str,
    profile: bool,
    logs: Path | None,
    output: Output,
) -> dict[str, Findings]:
    """Give the engines their turns; rank 0 shows them and writes the result after each turn."""
    first = crew.rank == 0
    console = Console(stderr=True, highlight=False, quiet=not first)
    setting = Setting(job, crew.size, gpu_facts(job.device) if first else None)
    traces = (output.folder or Path.cwd()).resolve()

    def turn(number: int, name: str) -> Turn:
        console.print(f"round {number + 1} of {rounds}: {ENGINES[name].label}")
        trace = str(traces / f"llama-{job.model}-{name}.trace.json.gz") if profile and number == 0 else None
        taken = crew.take_turn({"engine": name, "job": job.as_record(), "trace": trace}, limit_s=limit, log=logs)
        if taken.outcome is None:
            console.print(f"  failed: {taken.reason}", markup=False)
        return taken

    def after_turn(findings: dict[str, Findings], round_ended: bool) -> None:
        if first:
            deliver(findings, setting, baseline, output, shown=round_ended)

    return take_rounds(
        engines,
        rounds=rounds,
        missing={name: reason for name in engines if (reason := ENGINES[name].why_missing()) is not None},
        turn=turn,
        after_turn=after_turn,
    )


def measure_one_layer(job: Job, *, rounds: int, sample_ms: float, host_alone: bool, output: Output) -> None:
    """Time one decoder layer and write the result."""
    from benchmarks.training.one_layer import CALLED_FROM_PYTHON, layer_table, measure_layers

    target, gpu = command.measured_device(job.device)
    with idle_gpu() if host_alone else nullcontext():
        records, left_out = measure_layers(
            job.architecture,
            fp8_config(job.fp8_options),
            batch=job.micro_batch,
            sequence=job.sequence,
            device=target,
            rounds=rounds,
            sample_ms=sample_ms,
            names=CALLED_FROM_PYTHON if host_alone else None,
        )
    title = f"One decoder layer of {job.architecture.label}, {job.micro_batch} x {job.sequence} tokens"
    title += ", the host alone" if host_alone else ""
    result = Result(
        f"layer-{job.model}",
        title,
        environment.head(gpu, commit=output.commit),
        [layer_table(records, "Forward and backward")],
        left_out,
    )
    show(result, result.write(folder=output.folder, json_file=output.json_file))


@app.command()
def scaling(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json wrote.")],
    json: command.JsonFile = None,
    out: command.Folder = None,
) -> None:
    """Print weak scaling from the results of runs on different numbers of GPUs."""
    from benchmarks.training.scaling import read_runs, scaling_records, scaling_table

    try:
        runs = read_runs(files)
    except ValueError as error:
        command.refuse(str(error))
    head = runs[-1]["head"] | {"command": environment.command_line()}
    head["ranks"] = ", ".join(run["head"]["ranks"] for run in runs)
    head["dates"] = ", ".join(run["head"]["date"] for run in runs)
    result = Result("llama-scaling", "Weak scaling", head, [scaling_table(scaling_records(runs))])
    show(result, result.write(folder=out, json_file=json))


if __name__ == "__main__":
    app()

"""Compare the losses of FP8 and BF16 on the same text, over several seeds.

    python -m benchmarks.convergence --model 160m --data packages --seeds 4 --at-once 6 --minutes 8 --runs /tmp/runs
    python -m benchmarks.convergence --model 7b --layers 8 --data corpus.txt --variant bf16 --variant fp8 --out results
    python -m benchmarks.convergence --model 7b --data corpus.txt --also formats.gradient=e4m3 --out results
    python -m benchmarks.convergence --model 160m --variant fp8 --variant fp8-lean --outlier 7:200 --out results
    python -m benchmarks.convergence join seed-0.json seed-1.json --out results

One pair of runs does not tell what rounding costs from chance: two runs in BF16 that round differently diverge too. So
each seed, of weights and of the order of the text, has a run of each variant, and BF16 two: as Colossal-AI rounds, and
with the fused blocks that FP8 has. Started again with the same --runs, runs go on from where they stood.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.harness import command, environment
from benchmarks.harness.results import Result
from benchmarks.training.campaign import Place, places, work_off
from benchmarks.training.convergence import (
    Findings,
    course_table,
    end_table,
    forward_table,
    joined_head,
    kind_table,
    part_table,
    plot,
    read_runs,
)
from benchmarks.training.curves import timed_tables
from benchmarks.training.data import batches, tokens_of
from benchmarks.training.job import Job
from benchmarks.training.kinds import kind_of_text
from benchmarks.training.launch import is_launched
from benchmarks.training.learner import texts_of
from benchmarks.training.output import Output, describe, gpu_facts, head_of, show
from benchmarks.training.records import Setting, place_of
from benchmarks.training.runs import Run
from benchmarks.training.variants import VARIANTS, chosen, forwards
from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.training.batches import Replica

NONE: list[str] = []
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False, invoke_without_command=True)


@app.callback()
def main(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Option(help="Text to train on, as `fp8booster train --data`, or python, packages, mixed=FOLDER, tokens."),
    ] = "python",
    text_column: Annotated[str, typer.Option(help="Column with the text in tables.")] = "text",
    tokenizer: Annotated[Path | None, typer.Option(help="Folder of one (default: trained on the text).")] = None,
    held_out: Annotated[float, typer.Option(help="Share of the text that no run trains on, its end.")] = 0.01,
    kind: Annotated[
        list[str],
        typer.Option(help="Text to evaluate on: code, prose, headers, seen, a language as de, NAME=PATH; repeat it."),
    ] = NONE,
    evaluate_every: Annotated[
        int, typer.Option(help="Steps between evaluations on held-out and other text (default: the end alone).")
    ] = 0,
    evaluate_as: Annotated[
        list[str], typer.Option(help="A variant in FP8 as which all weights run at the end, too; repeat it.")
    ] = NONE,
    record: Annotated[
        int, typer.Option(help="Steps between samples of each FP8 tensor: outliers, zeros; 0 is none.")
    ] = 0,
    model: Annotated[str, typer.Option(help="As `benchmarks.llama --model`.")] = "7b",
    layers: Annotated[int | None, typer.Option(help="Layers, where not as many as the model has.")] = None,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    micro_batch: Annotated[int, typer.Option(help="Sequences a rank takes at once.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 300,
    lr: Annotated[float, typer.Option(help="Highest learning rate; a tenth of the steps lead up to it.")] = 1e-4,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each variant.")] = 4,
    first_seed: Annotated[int, typer.Option(min=0, help="The first seed; the others follow it.")] = 0,
    variant: Annotated[list[str], typer.Option(help=f"{', '.join(VARIANTS)} (default: all); repeat it.")] = NONE,
    also: Annotated[list[str], typer.Option(help="key=value for FP8Config of one variant more; repeat it.")] = NONE,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config of all; repeat the option.")] = NONE,
    outlier: Annotated[
        str | None, typer.Option(help="CHANNEL:FACTOR of a middle layer's gate and up, planted in the initial weights.")
    ] = None,
    gradient_scale: Annotated[
        float | None, typer.Option(help="Factor on all gradients, and on AdamW's eps; they are not clipped then.")
    ] = None,
    fp32_start: Annotated[
        bool, typer.Option("--fp32-start", help="Master weights begin between 16-bit values, as of a model in FP32.")
    ] = False,
    limit: Annotated[float, typer.Option(help="Seconds after which a run has failed.")] = 3600.0,
    minutes: Annotated[
        float | None, typer.Option(help="After so many, runs save and the command ends; start it again to go on.")
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder of losses and checkpoints, to resume from.")] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Runs that share the GPUs (default: as many as there are GPUs for).")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Ranks of a run, each on a GPU.")] = 1,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Train in FP8 and in BF16 by LowLevelZero, with several seeds, and compare the losses."""
    if context.invoked_subcommand is not None:
        return
    command.require_gpus(device)
    began = time.time()
    try:
        given = context.params | {"fp8_option": ["always=true", *fp8_option], "outlier": parse_outlier(outlier)}
        base = Job.from_options(given, warm_up=0)
        variants = chosen(variant, also)
        base = replace(base, forwards=forwards(evaluate_as, base))
        for options in (*(each.job(base, 0).fp8_options for each in variants), *dict(base.forwards).values()):
            fp8_config(options)
        if minutes is not None and runs is None:
            raise ValueError("--minutes ends runs that are to go on, and there is no --runs to go on from; add it")
        if minutes is not None and limit <= 60 * minutes:
            raise ValueError(
                f"--limit is {limit:g} s, and a run fails then before --minutes {minutes:g} lets it save; "
                f"give more than {60 * minutes:g}"
            )
        if is_launched():
            raise ValueError("this starts the processes of each run; start it without torchrun, with --processes")
        at = places(at_once, processes, device)
        base = replace(base, tokens=tokens_of(data, text_column, base, tokenizer))
        base = replace(base, kinds=tuple(kind_of_text(each, data, base.tokens, text_column) for each in kind))
        require_text(base, processes)
    except (TypeError, ValueError, OSError) as error:
        command.refuse(str(error))
    until = float("inf") if minutes is None else began + 60 * minutes
    with folder_of(runs) as root:
        campaign = Run.of(root, variants, range(first_seed, first_seed + seeds), base)
        setting = Setting(base, processes, gpu_facts(device))
        try:
            well = learn(campaign, at, until, limit, runs is not None, setting, Output(out, json, commit))
        except ValueError as error:
            command.refuse(str(error))
    raise typer.Exit(0 if well else 1)


def parse_outlier(text: str | None) -> tuple[int, float] | None:
    """A channel and a factor.

    Raises:
        ValueError: another form.
    """
    if text is None:
        return None
    channel, colon, factor = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(channel), float(factor)
    except ValueError:
        raise ValueError(f"--outlier is {text!r}; write it as CHANNEL:FACTOR, as 7:200") from None


def require_text(job: Job, ranks: int) -> None:
    """Raise ValueError where a text is too short for a step of all ranks, or to evaluate on: before the training."""
    cpu = torch.device("cpu")
    batches(job, Replica(0, ranks), cpu)
    for text in texts_of(job, cpu).values():
        next(iter(text()), None)


@contextmanager
def folder_of(runs: Path | None) -> Iterator[Path]:
    """The folder that was given, or one that is removed."""
    if runs is not None:
        yield runs
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def learn(
    campaign: Sequence[Run],
    at: Sequence[Place],
    until: float,
    limit: float,
    saves: bool,
    setting: Setting,
    output: Output,
) -> bool:
    """Train what has not ended, write the result after each run and show it at the end; returns whether all went well.

    Raises:
        ValueError: a file of the result cannot be written or is another training's, or `work_off` refuses.
    """
    console = Console(stderr=True, highlight=False)
    failed: dict[str, str] = {}
    begun: dict[str, int] = {}
    blank = blank_result(campaign, setting, output)
    blank.require_writable(folder=output.folder, json_file=output.json_file)
    require_own(blank, output.folder)

    def before(run: Run) -> None:
        begun[run.name] = done = run.folder.resumes_at
        console.print(run.name + (f", from step {done}" if done else ""), markup=False)

    def after(run: Run, reason: str | None) -> None:
        ended = run.folder.end() is not None
        if reason is not None:
            failed[run.name] = reason
        state = f"failed: {reason}" if reason else "ended" if ended else "saved"
        done, rate = len(run.folder.losses()), run.folder.speed(begun[run.name])
        speed = f", {rate:.0f} tokens/s" if rate else ""
        size = f", checkpoint of {1e-9 * size:.2f} GB" if (size := run.folder.checkpoint_bytes) else ""
        console.print(
            f"  {run.name}: {state} after {done} of {run.job.steps} steps{speed}{size}", markup=False, soft_wrap=True
        )
        if ended:
            written()

    def written() -> tuple[Result, list[Path]] | None:
        """Write the result so far; where that fails, say so, as the other runs are not to end with it."""
        try:
            return write(blank, campaign, failed, output)
        except (OSError, ValueError) as error:
            console.print(f"  the result cannot be written: {error}", markup=False, soft_wrap=True)
            return None

    work_off(campaign, at, until=until, limit_s=limit, saves=saves, before_run=before, after_run=after)
    last = written()
    show(*(last or write(blank, campaign, failed, Output(None, None, None))))
    done = sum(run.folder.end() is not None for run in campaign)
    left = sum(run.job.steps - len(run.folder.losses()) for run in campaign if run.folder.end() is None)
    tokens = 1e-6 * left * setting.tokens_a_step
    console.print(f"{done} of {len(campaign)} runs have ended, {tokens:.1f} M tokens are left", markup=False)
    return not failed and last is not None


def identified(tokens: TokenFile) -> str:
    """Say which text it is, on whatever machine: its digest, with the tokenizer's, and its size."""
    return f"{Path(tokens.name).name}, {tokens.count} tokens of {tokens.vocabulary} kinds, digest {tokens.identity}"


@app.command()
def join(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="What --json wrote.")],
    json: command.JsonFile = None,
    out: command.Folder = None,
) -> None:
    """Put together the results of runs with different seeds, such as on different GPUs."""
    try:
        found, variants, runs = read_runs(files)
    except ValueError as error:
        command.refuse(str(error))
    head = joined_head(files, runs) | {"command": environment.command_line(), "variants": "; ".join(variants)}
    there = {f"seed {seed}, {variant}" for seed, of_seed in found.losses.items() for variant in of_seed}
    left_out = {name: reason for run in runs for name, reason in run["left_out"].items() if name not in there}
    count = len({*found.losses, *found.not_finite})
    title = f"Losses of {count} seeds, each on {place_of(int(head['ranks']), on_gpus=head['GPU'] != 'CPU')}"
    name = f"{runs[0]['benchmark'].partition('-seeds-')[0]}-joined"
    try:
        result, written = deliver(name, title, head, found, variants, left_out, out, json)
    except (OSError, ValueError) as error:
        command.refuse(str(error))
    show(result, written)


def blank_result(campaign: Sequence[Run], setting: Setting, output: Output) -> Result:
    """Return the result of a campaign before it finds anything, with the date and so the name that it keeps."""
    job = setting.job
    seeds = dict.fromkeys(run.seed for run in campaign)
    title = f"{job.steps} steps of {job.architecture.label}, {job.architecture.layers} layers, on {setting.place}"
    tokens = job.steps * setting.tokens_a_step
    head = head_of(setting, output) | {"training": f"{describe(job)}, {job.steps} steps"}
    head["variants"] = "; ".join(labels_of(campaign))
    head |= {"tokens of a run": f"{tokens / 1e6:.1f} M of {job.tokens.count / 1e6:.1f} M"}
    head["text"] = identified(job.tokens)
    head |= {f"text of {name}": identified(each) for name, each in job.kinds}
    changes = {"outlier": job.outlier, "tiny-gradients": job.gradient_scale, "fp32-start": job.fp32_start}
    stress = "".join(f"-{change}" for change, asked in changes.items() if asked)
    name = f"convergence-{job.model}-{setting.ranks}{stress}-seeds-{'-'.join(map(str, seeds))}"
    return Result(name, title, head, [])


def labels_of(campaign: Sequence[Run]) -> list[str]:
    """Return the labels of its variants, each once."""
    return list(dict.fromkeys(run.variant.label for run in campaign))


def write(blank: Result, campaign: Sequence[Run], failed: dict[str, str], output: Output) -> tuple[Result, list[Path]]:
    """Write the result so far; returns it and its files."""
    found, left_out = Findings.of(campaign)
    head = blank.head | {f"in FP8, {variant}": layers for variant, layers in found.facts.items()}
    return deliver(
        blank.benchmark,
        blank.title,
        head,
        found,
        labels_of(campaign),
        left_out | failed,
        output.folder,
        output.json_file,
    )


def require_own(result: Result, folder: Path | None) -> None:
    """Raise ValueError where a folder has a result of the same name that is of another training."""
    if folder is None:
        return
    (file,) = result.files(folder=folder, json_file=None)
    if file.exists() and _trained(file.read_text()) != _trained(result.markdown()):
        raise ValueError(f"{file} is the result of another training; give another --out, or rename that file")


def _trained(markdown: str) -> list[str]:
    """Return the lines of a result's head that say what was trained, and on which text."""
    return [line for line in markdown.splitlines() if line.startswith(("- training: ", "- variants: ", "- text"))]


def deliver(
    name: str,
    title: str,
    head: dict[str, str],
    found: Findings,
    variants: list[str],
    left_out: dict[str, str],
    folder: Path | None,
    json_file: Path | None,
) -> tuple[Result, list[Path]]:
    """Write tables and plot; returns the result and its files.

    Raises:
        ValueError: the folder has a result of the same name that is of another training.
    """
    tables = [
        part_table(found, variants),
        *timed_tables(found, variants),
        kind_table(found, variants),
        forward_table(found, variants),
        end_table(found, variants),
        course_table(found.losses, variants),
    ]
    result = Result(name, title, head, tables, left_out)
    require_own(result, folder)
    if folder is not None:
        # not with_suffix, as versions in the stem have dots
        result = replace(result, plots=plot(folder / result.stem, found, variants, title))
    return result, result.write(folder=folder, json_file=json_file)


if __name__ == "__main__":
    app()

"""The `fp8booster` command: its commands and their options.

Each command imports what it runs when it runs: neither colossalai nor transformers is imported to show a help text.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fp8booster.cli.errors import OneSentenceErrors
from fp8booster.cli.plan.configurations import GPUS, WITHOUT_FP8
from fp8booster.cli.train.command import fields_of, flags, take_flags, train
from fp8booster.cli.train.options import MOST_PROCESSES, TrainOptions
from fp8booster.cli.train.progress import plain_console
from fp8booster.version import __version__

app = typer.Typer(
    cls=OneSentenceErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_FP8_OR_NOT = "Folder of a run, one of its checkpoints, or a model in Hugging Face's format, in FP8 or not"
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_FP8Options = Annotated[
    list[str] | None,
    typer.Option(
        help="key=value for FP8Config, as scaling=rowwise or scaling=constant; may be repeated.",
        show_default="as it was trained",
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8booster {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", envvar="FP8BOOSTER_DEBUG", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 training for Colossal-AI's Booster."""


app.command()(train)


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run with recorded tensors (`fp8booster train --record 50 --out RUN`)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Time FP8 and BF16 products; some seconds a device.")
    ] = True,
    patches: Annotated[
        bool, typer.Option("--patches", help="List each patch of Colossal-AI, with its place and its state.")
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Install what stops training for want of it, then look again.")
    ] = False,
    nodes: Annotated[
        bool,
        typer.Option(
            "--nodes",
            help="Under torchrun on all nodes: time collectives in 16 bits and FP8, and keep from where each gains.",
        ),
    ] = False,
    mib: Annotated[
        float | None, typer.Option(help="With --nodes: the largest payload in MiB.", show_default="256; on a CPU 16")
    ] = None,
) -> None:
    """Report what this machine can do in FP8, what is missing and which command installs or changes it.

    Exits with 1 when FP8 training cannot run here. Of RUN, suggests a recipe from what it recorded.
    """
    if mib is not None and not nodes:
        raise ValueError("--mib is about --nodes; give both, or leave it out.")
    if nodes:
        for flag, given in (
            ("RUN", run is not None),
            ("--no-speed", not speed),
            ("--patches", patches),
            ("--fix", fix),
        ):
            if given:
                raise ValueError(f"{flag} has no effect with --nodes, which measures links; leave one of them out.")
        _measure_links(mib, as_json)
        return
    if run is not None:
        for flag, given in (("--no-speed", not speed), ("--patches", patches), ("--fix", fix)):
            if given:
                raise ValueError(f"{flag} is about this machine, and RUN about {run}; leave one of them out.")
        from fp8booster.cli.plot.run import read_run

        found = read_run(run)
        lines, record = found.suggestion, found.as_record()
        typer.echo(
            json.dumps({name: record[name] for name in ("run", "advice")}, indent=2) if as_json else "\n".join(lines)
        )
        return
    from fp8booster.cli.doctor.examination import examine
    from fp8booster.cli.doctor.fixing import install, look_again
    from fp8booster.cli.doctor.tables import show

    with Console(stderr=True).status("Looking around") as status:
        examination = examine(speed, announce=status.update)
    if fix and install(examination.problems):
        flags = (("--json", as_json), ("--no-speed", not speed), ("--patches", patches))
        raise typer.Exit(look_again([flag for flag, given in flags if given]))
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(examination) | {"can_train": examination.can_train}, indent=2))
    else:
        show(examination, Console(), patches)
    if not examination.can_train:
        raise typer.Exit(1)


def _measure_links(mib: float | None, as_json: bool) -> None:
    from fp8booster.cli.doctor.links import measure_links
    from fp8booster.cli.doctor.tables import show_links
    from fp8booster.kernels.instructions import avoid_trapping_instructions

    avoid_trapping_instructions()
    first = os.environ.get("RANK", "0") == "0"
    with Console(stderr=True, quiet=not first).status("Joining the ranks") as status:
        found = measure_links(mib, announce=status.update)
    if first and as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
    elif first:
        show_links(found, Console())


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as `fp8booster train --out` names it.")],
    against: Annotated[Path | None, typer.Option(help="Folder of a run to compare the loss with.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page's file (default: page.html in the run's folder).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, without a page.")] = False,
) -> None:
    """Show a run as one HTML page: losses, what FP8 does to each tensor, worst layers first, and what to change.

    The page needs no network.
    """
    from fp8booster.cli.plot.run import PAGE, read_run

    if as_json:
        for flag, value in (("--against", against), ("--out", out)):
            if value is not None:
                raise ValueError(f"{flag} is about the page, which --json does not write; leave one of them out.")
        typer.echo(json.dumps(read_run(run).as_record(), indent=2))
        return
    from fp8booster.cli.plot.page import require_replaceable, write_page  # imports matplotlib

    found, path = read_run(run), out or run / PAGE
    require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, found, None if against is None else read_run(against))
    for each in found.advice:
        typer.echo(each.line)
    typer.echo(f"The page is in {path}.")


@app.command()
def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, one of its checkpoints, or a model in Hugging Face's format, or adapters of one."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder that is written; it must not be there.")],
    format: Annotated[
        str,
        typer.Option(
            help="fine-grained, compressed-tensors, compressed-tensors-tensorwise or tensorwise; bf16: all in 16 bits."
        ),
    ] = "fine-grained",
    engine_ranks: Annotated[
        int,
        typer.Option(
            min=0, help="Tensor parallel size of vLLM or SGLang, which refuse some shapes; 0: transformers reads it."
        ),
    ] = 1,
) -> None:
    """Write a model with its linear layers' weights in FP8, as transformers, vLLM and SGLang load it.

    Adapters are merged.
    """
    from fp8booster.cli.inference import find_source
    from fp8booster.serving import export

    found = find_source(source)
    done = export(
        found.model, out, format=format, config=found.config, masters=found.masters, engine_ranks=engine_ranks or None
    )
    of_masters = f", {done.from_masters} of them cast from FP32 masters" if done.from_masters else ""
    kept = f": {', '.join(done.kept)}" if done.layers else ""
    typer.echo(f"{done.layers} linear layers in FP8{of_masters}; {len(done.kept)} in 16 bits{kept}")
    if done.merged:
        typer.echo(f"Adapters were merged into {done.merged} weights.")
    typer.echo(f"{done.bytes / 2**20:,.1f} MiB are in {done.folder}, from {found.model}.")


@app.command("eval")
def evaluate(
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CHECKPOINT...", help=f"{_FP8_OR_NOT}; several are compared.")
    ],
    data: Annotated[str, typer.Option(help="Text, JSON-lines or Parquet file, folder of them, or saved dataset.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp8; may be repeated.", show_default="both")
    ] = None,
    calibrated: Annotated[
        int, typer.Option(min=0, help="Add FP8 with inputs scaled by amaxes of the first sequences, this many.")
    ] = 0,
    fp8_option: _FP8Options = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens to evaluate on.", show_default="all")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence.", show_default="as in training")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    text_column: Annotated[str, typer.Option(help="Column with the text in tables.")] = "text",
    cache: Annotated[
        str | None, typer.Option(help="Folder for token files.", show_default="~/.cache/fp8booster")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare a model's loss, perplexity and predictions in BF16 and in FP8 on the same text."""
    from fp8booster.cli.evaluation import EvalOptions, as_record, render, run

    asked = EvalOptions(
        checkpoints=checkpoints,
        precisions=precision or ["bf16", "fp8"],
        data=data,
        text_column=text_column,
        cache=cache,
        sequence=sequence,
        batch=batch,
        tokens=tokens,
        calibrated=calibrated,
        fp8_options=fp8_option or [],
    )
    found = run(asked, plain_console(sys.stderr).print)
    if as_json:
        typer.echo(as_record(found, asked))
    else:
        plain_console(sys.stdout).print(render(found))


@app.command()
def generate(
    checkpoint: Annotated[Path, typer.Argument(help=f"{_FP8_OR_NOT}.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    precision: Annotated[str, typer.Option(help="bf16 or fp8.")] = "fp8",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most tokens to generate.", show_default="128, or as many as the model has positions for"
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Temperature of sampling; 0: always the likeliest token.")
    ] = 0.0,
    # torch takes no larger seed
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of sampling.", show_default="0")] = None,
    kv_cache: Annotated[str, typer.Option(help="Keep keys and values in bf16 or fp8.")] = "bf16",
    fp8_option: _FP8Options = None,
) -> None:
    """Continue a prompt with a model, in BF16 or in FP8, and print the text."""
    from fp8booster.cli.generation import continuation

    tell = plain_console(sys.stderr).print
    sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
    typer.echo(continuation(checkpoint, prompt, precision, fp8_option or [], kv_cache, tell, **sampling))


def plan(
    model: Annotated[str, typer.Argument(help="As `fp8booster train --model`: a size, or a folder with a config.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="GPUs that train together.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"The kind: {', '.join(GPUS)}.")] = "H100",
    tokens: Annotated[
        int | None, typer.Option(min=1, max=2**30, help="Tokens of a micro-batch of a replica (default: by model).")
    ] = None,
    as_json: _Json = False,
    **given: Any,
) -> None:
    """Count the memory of a training step, part by part, in BF16, in FP8, and with what makes it smaller.

    Needs no GPU: the step is run on tensors without values.
    """
    if gpu in WITHOUT_FP8:
        raise ValueError(f"--gpu is {gpu}, which has no FP8 products to plan with; use one of {', '.join(GPUS)}")
    if gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu!r}; use one of {', '.join(GPUS)}")
    options = TrainOptions(model=model, nproc=gpus, **fields_of(given))
    from fp8booster.cli.plan.planning import as_record, make_plan, show

    told = Console(stderr=True)
    working = "Running steps on tensors without values, which may take minutes"
    if not told.is_terminal:
        told.print(working)
    with told.status(working):
        found = make_plan(options, tokens, GPUS[gpu], lambda line: told.print(line, markup=False, highlight=False))
    if as_json:
        typer.echo(json.dumps(as_record(found), indent=2))
    else:
        show(found, GPUS[gpu], Console())
    if not any(each.peaks for each in found):
        raise typer.Exit(1)


_MEMORY_DEPENDS_ON = (
    "sequence accumulate checkpointing checkpointed_layers level optimizer plugin stage tp pp sp ep sp_mode "
    "plugin_options fp8_options"
)
"""Options of `fp8booster train` that `plan` takes too."""

_own = [each for each in inspect.signature(plan, eval_str=True).parameters.values() if each.name != "given"]
take_flags(plan, [*_own, *flags(*_MEMORY_DEPENDS_ON.split())])
app.command()(plan)

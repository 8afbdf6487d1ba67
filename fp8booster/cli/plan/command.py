"""`fp8booster plan` on the command line: how much memory a run takes, before there is a GPU."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from fp8booster.cli.train.options import TrainOptions

from .configurations import GPUS

_NOTHING: list[str] = []


def plan(
    model: Annotated[str, typer.Argument(help="As `fp8booster train --model`: a size, or a folder with a config.")],
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train together.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"The kind: {', '.join(GPUS)}.")] = "H100",
    tokens: Annotated[
        int | None, typer.Option(help="Tokens that a replica of the model takes at once (default: by model).")
    ] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens of a sequence (default: by model).")] = None,
    accumulate: Annotated[
        int, typer.Option("--accumulate", "--micro-batches", help="Micro-batches for each optimizer step.")
    ] = 1,
    plugin: Annotated[str, typer.Option(help="As `fp8booster train --plugin`.")] = "low_level_zero",
    stage: Annotated[int | None, typer.Option("--stage", "--zero", help="ZeRO stage.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    sp: Annotated[int, typer.Option(help="Ranks that share a sequence.")] = 1,
    sp_mode: Annotated[str | None, typer.Option(help="Sequence parallelism.")] = None,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in every row.")] = False,
    optimizer: Annotated[str, typer.Option(help="As `fp8booster train --optimizer`, of every row.")] = "adamw",
    plugin_option: Annotated[list[str], typer.Option(help="key=value for the plugin; may be repeated.")] = _NOTHING,
    fp8_option: Annotated[list[str], typer.Option(help="key=value for FP8Config; may be repeated.")] = _NOTHING,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Count the memory of a training step, part by part, in BF16, in FP8, and with what makes it smaller.

    Needs no GPU: the step is run on tensors without values.
    """
    if gpu not in GPUS:
        raise ValueError(f"--gpu is {gpu!r}; use one of {', '.join(GPUS)}")
    options = TrainOptions(
        model=model,
        nproc=gpus,
        sequence=sequence,
        accumulate=accumulate,
        plugin=plugin,
        stage=stage,
        tp=tp,
        pp=pp,
        sp=sp,
        sp_mode=sp_mode,
        checkpointing=checkpointing,
        optimizer=optimizer,
        plugin_options=tuple(plugin_option),
        fp8_options=tuple(fp8_option),
    )
    from .planning import make_plan  # imports torch
    from .table import as_record, show

    console = Console(stderr=True)
    with console.status("Running steps on tensors without values"):
        found = make_plan(options, tokens, GPUS[gpu])
    if as_json:
        typer.echo(json.dumps(as_record(found), indent=2))
    else:
        show(found, GPUS[gpu], Console())
    if not any(each.peaks for each in found):
        raise typer.Exit(1)

"""`fp8booster plan` on the command line: how much memory a run takes, before there is a GPU."""

from __future__ import annotations

import inspect
import json
from typing import Annotated, Any

import typer
from rich.console import Console

from fp8booster.cli.train.command import fields_of, flags, take_flags
from fp8booster.cli.train.options import MOST_PROCESSES, TrainOptions

from .configurations import GPUS, WITHOUT_FP8

_FLAGS = flags(
    "sequence",
    "accumulate",
    "checkpointing",
    "checkpointed_layers",
    "level",
    "optimizer",
    "plugin",
    "stage",
    "tp",
    "pp",
    "sp",
    "sp_mode",
    "plugin_options",
    "fp8_options",
)
"""Of `fp8booster train`, what memory depends on."""


def plan(
    model: Annotated[str, typer.Argument(help="As `fp8booster train --model`: a size, or a folder with a config.")],
    gpus: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="GPUs that train together.")] = 1,
    gpu: Annotated[str, typer.Option(help=f"The kind: {', '.join(GPUS)}.")] = "H100",
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=2**30, help="Tokens that a replica of the model takes at once (default: by model)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
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


_own = [each for each in inspect.signature(plan, eval_str=True).parameters.values() if each.name != "given"]
take_flags(plan, [*_own, *_FLAGS])

"""`fp8booster train` on the command line: a flag for each field of `TrainOptions`, and `--resume`."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from typing import Annotated, Any, get_type_hints

import typer

from .options import PANELS, TrainOptions


def train(**given: Any) -> None:
    """Train a language model in BF16, in FP8, or in both on the same batches.

    Starts its own processes, or joins those of torchrun and `colossalai run`. Ctrl-C saves and stops.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    given = {name: value for name, value in given.items() if value is not None}
    resume = given.pop("resume", None)
    from .run import run

    status = run(given, resume, shlex.join(["fp8booster", *sys.argv[1:]]))
    if status:
        raise typer.Exit(status)


def _flag(name: str, kind: Any, panel: str, help: str, flags: tuple[str, ...] = ()) -> inspect.Parameter:
    """What typer reads of a parameter; None stands for a flag that was not given."""
    option = typer.Option(*flags, help=help, rich_help_panel=panel)
    annotation = Annotated[(list[str] if kind == tuple[str, ...] else kind) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _signature() -> inspect.Signature:
    kinds = get_type_hints(TrainOptions)
    flags = [_flag(field.name, kinds[field.name], **_shown(field)) for field in dataclasses.fields(TrainOptions)]
    flags.append(_flag("resume", str, PANELS[-1], "Run or checkpoint to continue, with its own options."))
    return inspect.Signature(flags)


def _shown(field: dataclasses.Field[Any]) -> dict[str, Any]:
    return {name: field.metadata[name] for name in ("panel", "help", "flags")}


train.__signature__ = _signature()
train.__annotations__ = {name: flag.annotation for name, flag in train.__signature__.parameters.items()}

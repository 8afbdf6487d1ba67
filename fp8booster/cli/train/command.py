"""`fp8booster train` on the command line: a flag for each field of `TrainOptions`, and `--resume`."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from .options import PANELS, TrainOptions


def train(**given: Any) -> None:
    """Train a language model in BF16, in FP8, or in both on the same batches.

    Starts its own processes, or joins those of torchrun and `colossalai run`. Ctrl-C saves and stops.
    """
    given = fields_of(given)
    resume = given.pop("resume", None)
    from .run import run

    status = run(given, resume, shlex.join(["fp8booster", *sys.argv[1:]]))
    if status:
        raise typer.Exit(status)


def _flag(name: str, kind: Any, panel: str, help: str, flags: tuple[str, ...] = ()) -> inspect.Parameter:
    """Return a parameter as typer reads it; None stands for a flag that was not given."""
    option = typer.Option(*flags, help=help, rich_help_panel=panel)
    annotation = Annotated[(list[str] if kind == tuple[str, ...] else kind) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def flags(*names: str) -> list[inspect.Parameter]:
    """Return the flags of fields of `TrainOptions`, as typer reads them; of all fields where none is named."""
    kinds, panel, parameters = get_type_hints(TrainOptions), "", []
    for field in dataclasses.fields(TrainOptions):
        panel = PANELS.get(field.name, panel)
        if not names or field.name in names:
            parameters.append(
                _flag(field.name, kinds[field.name], panel, field.metadata["help"], field.metadata["flags"])
            )
    return parameters


def fields_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return fields of `TrainOptions` from typer's values of flags, without those that were not given."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    return {name: value for name, value in fields.items() if value is not None}


def take_flags(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Let typer see a command that takes keywords as one with these parameters."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


_RESUME = _flag("resume", str, PANELS["out"], "Run or checkpoint to continue, with its own options.")
take_flags(train, [*flags(), _RESUME])

"""The `doctor` command: examine a machine, and exit with 1 where FP8 training cannot run; or a run's record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(help="Folder of a run that recorded, as `fp8booster train --record 50 --out` names it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Time FP8 and BF16 products; some seconds a device.")
    ] = True,
    patches: Annotated[
        bool, typer.Option("--patches", help="List each patch of Colossal-AI, with its place and its state.")
    ] = False,
) -> None:
    """Report what this machine can do in FP8, what is missing and which command installs or changes it.

    Exits with 1 when FP8 training cannot run here. Of RUN, suggests a recipe from what it recorded.
    """
    for flag, given in (("--no-speed", not speed), ("--patches", patches)):
        if given and run is not None:
            raise ValueError(f"{flag} is about this machine, and RUN about {run}; leave one of them out.")
    if run is not None:
        _suggest(run, as_json)
        return
    from fp8booster.cli.doctor.examination import examine  # these import torch
    from fp8booster.cli.doctor.tables import show

    progress = Console(stderr=True)
    with progress.status("Looking around") as status:
        examination = examine(speed, announce=status.update)
    if as_json:
        typer.echo(json.dumps(asdict(examination) | {"can_train": examination.can_train}, indent=2))
    else:
        show(examination, Console(), patches)
    if not examination.can_train:
        raise typer.Exit(1)


def _suggest(run: Path, as_json: bool) -> None:
    from fp8booster.cli.plot.run import read_run  # imports numpy

    found = read_run(run)
    lines = found.suggestion
    if as_json:
        record = found.as_record()
        typer.echo(json.dumps({name: record[name] for name in ("run", "advice")}, indent=2))
    else:
        typer.echo("\n".join(lines))

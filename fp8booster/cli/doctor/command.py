"""The `doctor` command: examine, show, and exit with 1 where FP8 training cannot run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed/--no-speed", help="Time FP8 and BF16 products; some seconds a device.")
    ] = True,
) -> None:
    """Report what this machine can do in FP8, what is missing and which command installs or changes it.

    Exits with 1 when FP8 training cannot run here.
    """
    from fp8booster.cli.doctor.examination import examine  # these import torch
    from fp8booster.cli.doctor.tables import show

    progress = Console(stderr=True)
    with progress.status("Looking around") as status:
        examination = examine(speed, announce=status.update)
    if as_json:
        typer.echo(json.dumps(asdict(examination) | {"can_train": examination.can_train}, indent=2))
    else:
        show(examination, Console())
    if not examination.can_train:
        raise typer.Exit(1)

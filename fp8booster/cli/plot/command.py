"""`fp8booster plot` on the command line: a run as one HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def plot(
    run: Annotated[Path, typer.Argument(help="Folder of a run, as `fp8booster train --out` names it.")],
    against: Annotated[Path | None, typer.Option(help="Folder of a run to compare the loss with.")] = None,
    out: Annotated[Path | None, typer.Option(help="The page's file (default: page.html in the run's folder).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead, without a page.")] = False,
) -> None:
    """Show a run as one HTML page: losses, what FP8 does to each tensor, worst layers first, and what to change.

    The page needs no network.
    """
    from .run import PAGE, read_run  # imports numpy

    if as_json:
        for flag, value in (("--against", against), ("--out", out)):
            if value is not None:
                raise ValueError(f"{flag} {value} is of the page, which --json does not write; leave one of them out.")
    found = read_run(run)
    if as_json:
        typer.echo(json.dumps(found.as_record(), indent=2))
        return
    path = out or run / PAGE
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; give the page's file, as {path / PAGE}.")
    if path.exists() and not _is_page(path):
        raise ValueError(f"--out {path} is there and no HTML page, and is left as it is; give another file.")
    path.parent.mkdir(parents=True, exist_ok=True)
    from .page import write_page  # imports matplotlib

    write_page(path, found, None if against is None else read_run(against))
    for each in found.advice:
        typer.echo(each.line)
    typer.echo(f"The page is in {path}.")


def _is_page(path: Path) -> bool:
    """Tell whether a file may be replaced by a page: it is one itself, or empty."""
    if not path.is_file():  # as a device
        return False
    with path.open("rb") as stream:
        return stream.read(len(_BEGINNING)).lower() in (b"", _BEGINNING)


_BEGINNING = b"<!doctype html"

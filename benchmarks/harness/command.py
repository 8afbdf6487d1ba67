"""The options that every benchmark has, and what a benchmark says where it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import track

from benchmarks.harness.environment import Gpu, gpu_of
from benchmarks.harness.results import Result
from fp8booster.kernels.device import require_fp8

Item = TypeVar("Item")

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample and the head to this file.")]
Folder = Annotated[Path | None, typer.Option("--out", help="Write Markdown and plots into this folder.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds and shapes: to see that it runs.")]
Commit = Annotated[
    str | None, typer.Option(help="Git commit for the head, where the sources were copied without their .git.")
]
DeviceName = Annotated[str, typer.Option("--device", help="cuda, or cpu, which runs the same code slowly.")]
Models = Annotated[list[str], typer.Option(help="Whose layers: 7b, 13b, 70b, 35b, te; repeat the option.")]
Tokens = Annotated[list[int], typer.Option(help="M, the tokens of a batch; repeat the option.")]


def run_command(main: Callable[..., None]) -> None:
    """Run a benchmark's `main` as the command it is."""
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()


def measured_device(name: str) -> tuple[torch.device, Gpu]:
    """The device to measure and its facts; where it cannot be, say so in one sentence and exit with 2."""
    if name == "cuda" and not torch.cuda.is_available():
        refuse("this benchmark measures a CUDA GPU and torch finds none; run it on a machine that has one")
    device = torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
    try:
        require_fp8(device, emulate=False)
        return device, gpu_of(device)
    except (ValueError, RuntimeError) as error:
        refuse(str(error))


def require_gpus(device: str) -> None:
    """Exit with 2 and a sentence where GPUs are to be measured and there are none; none is touched."""
    if device == "cuda" and not torch.cuda.is_available():
        refuse("this benchmark measures CUDA GPUs and torch finds none; run it on a machine that has some")


def refuse(sentence: str) -> NoReturn:
    """Say what the user can correct and exit with 2."""
    typer.echo(f"error: {sentence}", err=True)
    raise typer.Exit(2)


def progress(work: Sequence[Item]) -> Iterable[Item]:
    """Go through pieces of work, showing on stderr how far it is."""
    return track(work, description="measuring", console=Console(stderr=True))


def deliver(result: Result, *, folder: Path | None, json_file: Path | None) -> None:
    """Print a result and write its files."""
    typer.echo(result.markdown())
    for path in result.write(folder=folder, json_file=json_file):
        typer.echo(f"wrote {path}", err=True)

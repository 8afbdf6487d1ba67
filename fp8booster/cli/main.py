"""The `fp8booster` command: which commands there are.

The modules of commands import only what their signatures need, so that neither colossalai nor transformers is imported
before one runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fp8booster.cli.doctor.command import doctor
from fp8booster.cli.errors import OneSentenceErrors
from fp8booster.cli.eval.command import evaluate
from fp8booster.cli.export.command import export
from fp8booster.cli.generate.command import generate
from fp8booster.cli.plan.command import plan
from fp8booster.cli.plot.command import plot
from fp8booster.cli.train.command import train
from fp8booster.version import __version__


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8booster {__version__}")
        raise typer.Exit


app = typer.Typer(
    cls=OneSentenceErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
app.command()(doctor)
app.command()(plan)
app.command()(plot)
app.command()(export)
app.command("eval")(evaluate)
app.command()(generate)

"""Errors of use on the command line: a sentence in place of a traceback."""

from __future__ import annotations

import os
from typing import Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from fp8booster.cli.train.errors import USER_ERRORS, OutOfMemory

EXIT_CODE = 2


class OneSentenceErrors(TyperGroup):
    """A group of commands that reports an error of use as one sentence, and with `--debug` as a traceback."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command line; COLUMNS=0, with which rich shows no text at all, is ignored."""
        if os.environ.get("COLUMNS", "1").strip("0") == "":
            del os.environ["COLUMNS"]
        return super().main(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit with 2 on an error of use."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who reads the output has left: an OSError, and no error of use
            raise
        except USER_ERRORS as error:
            # the sentence hides where an error arose
            if ctx.params["debug"]:
                raise
            sentence = Text.assemble(("error: ", "bold red"), _sentence(error))
            Console(stderr=True, soft_wrap=True, highlight=False).print(sentence)
            if isinstance(error, OutOfMemory):
                from fp8booster.cli.plan.planning import explain  # imports torch

                explain(error)
            raise typer.Exit(EXIT_CODE) from None


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:  # of the system: no number, no repr
        return f"{error.filename}: {error.strerror}."
    return str(error) or type(error).__name__

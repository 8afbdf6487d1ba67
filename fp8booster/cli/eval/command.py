"""`fp8booster eval` on the command line: losses in BF16 and in FP8 side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    checkpoints: Annotated[
        list[Path],
        typer.Argument(
            metavar="CHECKPOINT...",
            help="Folder of a run, one of its checkpoints, or a model in Hugging Face's format, in FP8 or not; "
            "several are compared.",
        ),
    ],
    data: Annotated[str, typer.Option(help="Text, JSON-lines or Parquet file, folder of them, or saved dataset.")],
    precision: Annotated[
        list[str] | None, typer.Option(help="bf16 or fp8; may be repeated.", show_default="both")
    ] = None,
    calibrated: Annotated[
        int, typer.Option(min=0, help="Add FP8 with inputs scaled by amaxes of so many sequences, the first ones.")
    ] = 0,
    fp8_option: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value for FP8Config, as granularity=rowwise or scaling=constant; may be repeated.",
            show_default="as it was trained",
        ),
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Evaluate on so many tokens.", show_default="all")] = None,
    sequence: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a sequence.", show_default="as in training")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    text_column: Annotated[str, typer.Option(help="Column with the text in tables.")] = "text",
    cache: Annotated[
        str | None, typer.Option(help="Folder for token files.", show_default="~/.cache/fp8booster")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Give a model's loss and perplexity in BF16 and in FP8 on the same text, and how far its predictions move."""
    from rich.console import Console

    from .columns import EvalOptions, run  # imports torch
    from .table import as_record, render

    asked = EvalOptions(
        checkpoints=checkpoints,
        precisions=precision or ["bf16", "fp8"],
        data=data,
        text_column=text_column,
        cache=cache,
        sequence=sequence,
        batch=batch,
        tokens=tokens,
        calibrated=calibrated,
        fp8_options=fp8_option or [],
    )
    # names of files may have brackets, which are no markup
    told = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
    found = run(asked, told.print)
    if as_json:
        typer.echo(as_record(found, asked))
    else:
        Console(soft_wrap=True, highlight=False, markup=False).print(render(found))

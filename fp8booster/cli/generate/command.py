"""`fp8booster generate` on the command line: what a model makes of a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, one of its checkpoints, or a model in Hugging Face's format, in FP8 or not."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    precision: Annotated[str, typer.Option(help="bf16 or fp8.")] = "fp8",
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens to make at most.", show_default="128, or as many as the model has positions for"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="Of sampling; 0: always the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sampling.", show_default="0")] = None,
    kv_cache: Annotated[str, typer.Option(help="Keep keys and values in bf16 or fp8.")] = "bf16",
    fp8_option: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value for FP8Config, as granularity=rowwise; may be repeated.", show_default="as it was trained"
        ),
    ] = None,
) -> None:
    """Print a prompt and what a model makes of it, in BF16 or in FP8."""
    from rich.console import Console

    from .continuation import GenerateOptions, continuation  # imports torch

    asked = GenerateOptions(
        checkpoint=checkpoint,
        prompt=prompt,
        precision=precision,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        kv_cache=kv_cache,
        fp8_options=fp8_option or [],
    )
    typer.echo(continuation(asked, Console(stderr=True, soft_wrap=True, highlight=False).print))

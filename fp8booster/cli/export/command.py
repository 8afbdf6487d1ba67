"""`fp8booster export` on the command line: a run, a checkpoint or a model with its weights in FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, one of its checkpoints, or a model in Hugging Face's format, or adapters of one."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder that is written; it must not be there.")],
    format: Annotated[
        str,
        typer.Option(
            help="fine-grained, compressed-tensors, compressed-tensors-tensorwise or tensorwise; bf16: all in 16 bits."
        ),
    ] = "fine-grained",
) -> None:
    """Write a model with its linear layers' weights in FP8, as transformers, vLLM and SGLang load it.

    Adapters are merged.
    """
    from fp8booster.serving import export  # imports torch

    from .source import find_source

    found = find_source(source)
    done = export(found.model, out, format=format, config=found.config, masters=found.masters)
    of_masters = f", {done.from_masters} of them cast from FP32 masters" if done.from_masters else ""
    kept = f": {', '.join(done.kept)}" if done.layers else ""
    typer.echo(f"{done.layers} linear layers in FP8{of_masters}; {len(done.kept)} in 16 bits{kept}")
    if done.merged:
        typer.echo(f"Adapters were merged into {done.merged} weights.")
    typer.echo(f"{done.bytes / 2**20:,.1f} MiB are in {done.folder}, from {found.model}.")

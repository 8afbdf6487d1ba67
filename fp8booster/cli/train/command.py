"""`fp8booster train` on the command line."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

import typer

from fp8booster.training.parallel import MODES_OF_OWN_RANKS, MODES_OF_TENSOR_RANKS

from .options import PLUGINS, PRECISIONS, PROGRESS

_MODEL = "Model and data"
_TRAINING = "Training"
_MACHINE = "Machine"
_RUN = "Run"


def train(
    model: Annotated[
        str | None,
        typer.Option(
            help="tiny, 100m, 1b, 7b, 13b, 70b, or a folder with a Hugging Face config or checkpoint (default: tiny).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text, JSON-lines or Parquet file, folder of them, or saved dataset (default: Python's sources).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(help="Column with the text in tables (default: text).", rich_help_panel=_MODEL)
    ] = None,
    vocabulary: Annotated[
        int | None,
        typer.Option(
            help="Tokens of the tokenizer that is trained when the model brings none (default: by model).",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Folder for tokenizers and token files (default: ~/.cache/fp8booster).", rich_help_panel=_MODEL
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(PRECISIONS)}; compare: BF16, then FP8, same seed and batches (default: compare).",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps (default: by model).", rich_help_panel=_TRAINING)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences a replica of the model takes at once (default: by model).", rich_help_panel=_TRAINING
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(
            "--accumulate",
            "--micro-batches",
            help="Micro-batches for each optimizer step, accumulated or passed through a pipeline (default: 1).",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (default: by model).", rich_help_panel=_TRAINING)
    ] = None,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate (default: by model).", rich_help_panel=_TRAINING)
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(help="Steps of linear warm-up (default: a tenth of the steps).", rich_help_panel=_TRAINING),
    ] = None,
    decay: Annotated[
        int | None,
        typer.Option(help="Step at which the cosine decay ends (default: the last).", rich_help_panel=_TRAINING),
    ] = None,
    min_lr: Annotated[
        float | None, typer.Option(help="Learning rate after the decay (default: lr / 10).", rich_help_panel=_TRAINING)
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(help="AdamW's weight decay (default: 0.1).", rich_help_panel=_TRAINING)
    ] = None,
    max_norm: Annotated[
        float | None,
        typer.Option(help="Clip gradients to this norm; 0: do not (default: 1).", rich_help_panel=_TRAINING),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of weights and batches (default: 0).", rich_help_panel=_TRAINING)
    ] = None,
    checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--checkpointing/--no-checkpointing",
            help="Recompute activations in the backward pass (default: no).",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="Deterministic kernels only, at some cost (default: no).",
            rich_help_panel=_TRAINING,
        ),
    ] = None,
    plugin: Annotated[
        str | None,
        typer.Option(
            help=f"Colossal-AI plugin: {', '.join(PLUGINS)} (default: low_level_zero).", rich_help_panel=_MACHINE
        ),
    ] = None,
    stage: Annotated[
        int | None,
        typer.Option(
            "--stage",
            "--zero",
            help="ZeRO stage: low_level_zero 1, 2 (default: 2), hybrid 0, 1, 2 (default: 1).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallel ranks: gemini, hybrid (default: 1).", rich_help_panel=_MACHINE)
    ] = None,
    pp: Annotated[
        int | None, typer.Option(help="Pipeline stages: hybrid (default: 1).", rich_help_panel=_MACHINE)
    ] = None,
    sp: Annotated[
        int | None,
        typer.Option(
            help=f"Ranks that share a sequence in --sp-mode {' and '.join(MODES_OF_OWN_RANKS)} (default: 1).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    sp_mode: Annotated[
        str | None,
        typer.Option(
            help=f"Sequence parallelism: hybrid; {', '.join(MODES_OF_TENSOR_RANKS)} among --tp ranks, "
            f"{', '.join(MODES_OF_OWN_RANKS)} among --sp (default: none).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    plugin_option: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value for the plugin's constructor, as pp_style=zbv (zero-bubble) or pp_style=interleaved with "
            "--pp; may be repeated.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    fp8_option: Annotated[
        list[str] | None,
        typer.Option(
            help="key=value for FP8Config, as granularity=rowwise; may be repeated.", rich_help_panel=_MACHINE
        ),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Processes to start, when not under torchrun (default: one a GPU; without a GPU 2).",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(help="Folder of the run (default: runs/<model>-<precision>-<time>).", rich_help_panel=_RUN),
    ] = None,
    save: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints; 0: only at the end (default: 0).", rich_help_panel=_RUN),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(help="Newest checkpoints that stay on disk; 0: all (default: 2).", rich_help_panel=_RUN),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(help="Run or checkpoint to continue, with its own options.", rich_help_panel=_RUN)
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a step after which the rank that hangs is named and the run ends; 0: never "
            "(default: 120, or ten times the longest step).",
            rich_help_panel=_RUN,
        ),
    ] = None,
    progress: Annotated[
        str | None, typer.Option(help=f"{', '.join(PROGRESS)} (default: auto).", rich_help_panel=_RUN)
    ] = None,
) -> None:
    """Train a language model in BF16, in FP8, or in both on the same batches.

    Starts its own processes, or joins those of torchrun and `colossalai run`. Ctrl-C saves and stops.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    resume = given.pop("resume", None)
    for name in ("plugin_option", "fp8_option"):
        if name in given:
            given[f"{name}s"] = tuple(given.pop(name))
    from .run import run

    status = run(given, resume, shlex.join(["fp8booster", *sys.argv[1:]]))
    if status:
        raise typer.Exit(status)

"""`fp8booster eval`: losses of models in BF16 and in FP8 on the same text, and how far predictions lie apart."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.table import Table
from torch import nn

from fp8booster.cli.inference import (
    PRECISIONS,
    find_model,
    inference_config,
    inference_device,
    load_model,
    require_one_of,
)
from fp8booster.cli.metrics import finite_or_null
from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.model_folder import load_config
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.summary import machine
from fp8booster.files import cache_folder
from fp8booster.nn.report import report

CALIBRATED = "fp8-calibrated"


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of `fp8booster eval`."""

    checkpoints: Sequence[Path]
    precisions: Sequence[str]
    data: str | None
    text_column: str
    cache: str | None
    sequence: int | None  # None: as in training, else what the model has positions for, 2048 at most
    batch: int
    tokens: int | None  # None: all that there are
    calibrated: int  # sequences to calibrate with, the first ones, which are not evaluated; 0: no such column
    fp8_options: Sequence[str]


@dataclass(frozen=True)
class Losses:
    """Losses of a model on some tokens."""

    loss: float  # mean negative log-likelihood of a token given those before it, in nats
    kl: float  # mean Kullback-Leibler divergence of its predictions from the first model's, in nats a token

    @property
    def perplexity(self) -> float:
        """Return e to the loss; infinity where a float does not reach."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass(frozen=True)
class Column:
    """One model in one precision."""

    checkpoint: str
    precision: str
    loss: float
    perplexity: float
    kl: float
    fp8_layers: int
    from_masters: int
    """FP8 layers whose weights were cast from FP32 master weights; others from the checkpoint's values."""
    layers: int
    fp8_others: int
    """Parameters outside of linear layers in FP8, as experts in one parameter."""
    others: int
    parameter_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """Columns to compare, and the text behind them."""

    columns: list[Column]
    data: str
    tokens: int  # that are predicted
    sequence: int
    calibration_tokens: int


_LONGEST = 2048  # tokens of a sequence, where the length in training is not known


def run(options: EvalOptions, tell: Callable[[str], None]) -> Evaluation:
    """Load each model in each precision and evaluate it; `tell` hears what is done.

    Raises:
        ValueError: a checkpoint is none, the models have other vocabularies, or the text is too short.
    """
    for precision in options.precisions:
        require_one_of(precision, PRECISIONS, "--precision")
    sources = [find_model(checkpoint) for checkpoint in options.checkpoints]
    device = inference_device(tell)
    cache = options.cache or str(cache_folder())
    asked = TrainOptions(model=str(sources[0].model), data=options.data, text_column=options.text_column, cache=cache)
    tokens = prepare_tokens(asked, tell)
    configs = [load_config(str(source.model), tokens.vocabulary, 1) for source in sources]
    longest = min(getattr(config, "max_position_embeddings", _LONGEST) for config in configs)
    sequence = options.sequence or sources[0].sequence or min(longest, _LONGEST)
    for source, config in zip(sources, configs, strict=True):
        load_config(str(source.model), tokens.vocabulary, sequence)
        if config.vocab_size != configs[0].vocab_size:
            raise ValueError(
                f"{source.model} has {config.vocab_size} tokens and {sources[0].model} {configs[0].vocab_size}; "
                "evaluate models with one tokenizer together."
            )
    held_out, calibration = _pieces(tokens, sequence, options)
    batches = list(_batches(calibration, options.batch, device)) if len(calibration) else None
    models, made = [], []  # all at once: predictions are compared token by token
    for source, checkpoint in zip(sources, options.checkpoints, strict=True):
        config = inference_config(source, options.fp8_options)
        for precision in (*options.precisions, *([CALIBRATED] if batches is not None else [])):
            tell(f"loading {source.model} in {precision}")
            given = batches if precision == CALIBRATED else None
            model, from_masters = load_model(source, precision.partition("-")[0], config, device, given)
            models.append(model)
            layers = report(model)
            made.append(
                {
                    "checkpoint": str(checkpoint),
                    "precision": precision,
                    "fp8_layers": len(layers.fp8),
                    "from_masters": from_masters,
                    "layers": len(layers.rows),
                    "fp8_others": sum(row.precision == "FP8" for row in layers.outside),
                    "others": len(layers.outside),
                    "parameter_bytes": sum(parameter.nbytes for parameter in model.parameters()),
                }
            )
    tell(f"evaluating on {held_out.size:,} tokens")
    found = evaluate(models, _batches(held_out, options.batch, device))
    return Evaluation(
        columns=[
            Column(loss=losses.loss, perplexity=losses.perplexity, kl=losses.kl, **each)
            for losses, each in zip(found, made, strict=True)
        ],
        data=tokens.name,
        tokens=held_out.size - len(held_out),
        sequence=sequence,
        calibration_tokens=calibration.size,
    )


def _pieces(tokens: TokenFile, sequence: int, options: EvalOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return sequences, [count, sequence], to evaluate on, and those before them to calibrate with."""
    ids = tokens.open()
    count = len(ids) // sequence
    if count <= options.calibrated:
        raise ValueError(
            f"The text has {len(ids)} tokens, {count} sequences of {sequence}, of which --calibrated takes "
            f"{options.calibrated}; give more --data, or a smaller --sequence or --calibrated."
        )
    pieces = ids[: count * sequence].reshape(count, sequence)
    # sequences that gave the scales would flatter them: they are not evaluated
    calibration, rest = pieces[: options.calibrated], pieces[options.calibrated :]
    return rest if options.tokens is None else rest[: max(1, options.tokens // sequence)], calibration


def _batches(pieces: np.ndarray, size: int, device: torch.device) -> Iterator[torch.Tensor]:
    for first in range(0, len(pieces), size):
        yield torch.from_numpy(pieces[first : first + size].astype(np.int64)).to(device)


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], batches: Iterable[torch.Tensor]) -> list[Losses]:
    """Return the losses of each model, summed in float64.

    Args:
        models: causal language models of transformers, with one vocabulary, on one device.
        batches: token ids, [batch, sequence] each; the first token of a sequence is not predicted.
    """
    device = next(models[0].parameters()).device
    # differences between precisions are smaller than what float32 loses in a sum over many tokens
    losses = torch.zeros(len(models), dtype=torch.float64, device=device)
    divergences = torch.zeros_like(losses)
    count = 0
    for batch in batches:
        ids = batch.to(device)
        # one forward a batch: keys and values would be kept for nothing
        logits = [model(input_ids=ids, use_cache=False).logits for model in models]
        for row in range(len(ids)):  # logits in FP32 take twice the memory: one sequence of them at a time
            # in BF16 a sum over a vocabulary would hide the differences that are looked for
            first = logits[0][row, :-1].float().log_softmax(-1)
            for number in range(len(models)):
                own = first if number == 0 else logits[number][row, :-1].float().log_softmax(-1)
                losses[number] -= own.gather(-1, ids[row, 1:, None]).double().sum()
                divergences[number] += (first.exp() * (first - own)).double().sum()
        count += ids[:, 1:].numel()
    return [Losses(*each) for each in zip((losses / count).tolist(), (divergences / count).tolist(), strict=True)]


def render(found: Evaluation) -> Table:
    """Return a table for a terminal, with a column for each model and precision."""
    columns = found.columns
    title = f"{found.tokens:,} tokens of {found.data}, in sequences of {found.sequence}"
    if found.calibration_tokens:
        title += f"; calibrated with the {found.calibration_tokens:,} before them"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    several = len({column.checkpoint for column in columns}) > 1
    for column in columns:
        name = column.precision.upper().replace("-CALIBRATED", " calibrated")
        table.add_column(f"{Path(column.checkpoint).name}\n{name}" if several else name, justify="right")

    def add(title: str, cell: Callable[[Column], str], first: str | None = None) -> None:
        cells = map(cell, columns if first is None else columns[1:])
        table.add_row(title, *([] if first is None else [first]), *cells)

    base = columns[0].loss
    add("loss", lambda column: f"{column.loss:.4f}")
    if len(columns) > 1:
        add("difference from the first", lambda column: f"{100 * (column.loss / base - 1):+.3f} %", first="")
    add("perplexity", lambda column: f"{column.perplexity:.3f}")
    if len(columns) > 1:
        add("KL from the first, nats a token", lambda column: f"{column.kl:.2e}", first="")
    add("parameters, MiB", lambda column: f"{column.parameter_bytes / 2**20:,.1f}")
    add("linear layers in FP8", lambda column: f"{column.fp8_layers} of {column.layers}")
    if any(column.others for column in columns):
        add("other weights in FP8", lambda column: f"{column.fp8_others} of {column.others}")
    if any(column.fp8_layers for column in columns):
        add(
            "cast from FP32 master weights",
            lambda column: f"{column.from_masters} of {column.fp8_layers}" if column.fp8_layers else "",
        )
    return table


def as_record(found: Evaluation, asked: EvalOptions) -> str:
    """Return the evaluation as JSON, with the command, the machine and the options."""
    options = {**dataclasses.asdict(asked), "checkpoints": [str(each) for each in asked.checkpoints]}
    command = shlex.join(["fp8booster", *sys.argv[1:]])
    record = {**machine(), "command": command, "options": options, **dataclasses.asdict(found)}
    record["columns"] = [{name: finite_or_null(value) for name, value in each.items()} for each in record["columns"]]
    return json.dumps(record, indent=1)

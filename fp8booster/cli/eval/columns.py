"""One call of `fp8booster eval`: read the text, load each model in each precision, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fp8booster.cli.inference import (
    PRECISIONS,
    find_model,
    inference_config,
    inference_device,
    load_model,
    require_one_of,
)
from fp8booster.cli.train.defaults import cache_folder
from fp8booster.cli.train.model_folder import load_config
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.tokens import TokenFile, prepare_tokens
from fp8booster.nn.report import report

from .losses import Losses, evaluate

CALIBRATED = "fp8-calibrated"


@dataclass(frozen=True)
class Column:
    """One model in one precision."""

    checkpoint: str
    precision: str
    loss: float
    perplexity: float
    kl: float
    """From the first column's predictions, in nats a token."""
    fp8_layers: int
    from_masters: int
    """Of these, layers whose weights were cast from FP32 master weights; others from the checkpoint's values."""
    layers: int
    parameter_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """What a call found."""

    columns: list[Column]
    data: str
    tokens: int
    """Predicted."""
    sequence: int
    """Tokens of a sequence."""
    calibration_tokens: int


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """What a call is asked for."""

    checkpoints: Sequence[Path]
    precisions: Sequence[str]
    data: str | None
    text_column: str
    cache: str | None
    sequence: int | None
    """None: as in training, else what the model has positions for, 2048 at most."""
    batch: int
    tokens: int | None
    """None: all that there are."""
    calibrated: int
    """Sequences to calibrate with, the first ones, which are not evaluated; 0: no such column."""
    fp8_options: Sequence[str]


_LONGEST = 2048
"""Tokens of a sequence, where nothing says how long those of training were."""


def run(options: EvalOptions, tell: Callable[[str], None]) -> Evaluation:
    """Evaluate; `tell` says what is done.

    Raises:
        ValueError: a checkpoint is none, the models have other vocabularies, or the text is too short.
    """
    for precision in options.precisions:
        require_one_of(precision, PRECISIONS, "--precision")
    sources = [find_model(checkpoint) for checkpoint in options.checkpoints]
    device, trapping = inference_device()
    if trapping is not None:
        tell(trapping)
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
    models, made = [], []
    for source, checkpoint in zip(sources, options.checkpoints, strict=True):
        config = inference_config(source, options.fp8_options)
        for precision in (*options.precisions, *([CALIBRATED] if batches is not None else [])):
            tell(f"loading {source.model} in {precision}")
            given = batches if precision == CALIBRATED else None
            loaded = load_model(source, precision.partition("-")[0], config, device, given)
            models.append(loaded.model)
            made.append((str(checkpoint), precision, loaded.from_masters))
    tell(f"evaluating on {held_out.size:,} tokens")
    found = evaluate(models, _batches(held_out, options.batch, device))
    return Evaluation(
        columns=[_column(*each) for each in zip(made, models, found, strict=True)],
        data=tokens.name,
        tokens=held_out.size - len(held_out),
        sequence=sequence,
        calibration_tokens=calibration.size,
    )


def _pieces(tokens: TokenFile, sequence: int, options: EvalOptions) -> tuple[np.ndarray, np.ndarray]:
    """Sequences, [count, sequence], to evaluate on, and others to calibrate with, which come before them."""
    ids = tokens.open()
    count = len(ids) // sequence
    if count <= options.calibrated:
        raise ValueError(
            f"The text has {len(ids)} tokens, {count} sequences of {sequence}, of which --calibrated takes "
            f"{options.calibrated}; give more --data, or a smaller --sequence or --calibrated."
        )
    pieces = ids[: count * sequence].reshape(count, sequence)
    calibration, rest = pieces[: options.calibrated], pieces[options.calibrated :]
    return rest if options.tokens is None else rest[: max(1, options.tokens // sequence)], calibration


def _batches(pieces: np.ndarray, size: int, device: torch.device) -> Iterator[torch.Tensor]:
    for first in range(0, len(pieces), size):
        yield torch.from_numpy(pieces[first : first + size].astype(np.int64)).to(device)


def _column(made: tuple[str, str, int], model: torch.nn.Module, found: Losses) -> Column:
    checkpoint, precision, from_masters = made
    layers = report(model)
    return Column(
        checkpoint=checkpoint,
        precision=precision,
        loss=found.loss,
        perplexity=found.perplexity,
        kl=found.kl,
        fp8_layers=len(layers.fp8),
        from_masters=from_masters,
        layers=len(layers.rows),
        parameter_bytes=sum(parameter.nbytes for parameter in model.parameters()),
    )

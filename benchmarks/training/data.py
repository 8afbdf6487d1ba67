"""What the engines are fed: the same tokens for each of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.training.job import Job
from fp8booster.cli.train.defaults import cache_folder
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.tokens import TokenFile, prepare_tokens
from fp8booster.training.batches import Batches, GlobalBatch, Replica

RANDOM_BATCHES = 2
"""Batches of random tokens, taken in turn."""


def batches(job: Job, replica: Replica, device: torch.device) -> Callable[[int], torch.Tensor]:
    """A function from the number of a step, counted from 0, to this replica's tokens of it.

    Tokens are  [micro_batches * micro_batch, sequence], int64, on `device`.

    Raises:
        ValueError: the text is too short for one step, or has more tokens than the model has embeddings.
    """
    rows = job.micro_batches * job.micro_batch
    vocabulary = job.architecture.vocabulary
    if job.tokens is None:
        generator = torch.Generator().manual_seed(job.seed + replica.index)
        held = [
            torch.randint(0, vocabulary, (rows, job.sequence), generator=generator).to(device)
            for _ in range(RANDOM_BATCHES)
        ]
        return lambda step: held[step % RANDOM_BATCHES]
    if job.tokens.vocabulary > vocabulary:
        raise ValueError(
            f"the text has {job.tokens.vocabulary} kinds of tokens and --model {job.model} embeddings for {vocabulary}"
        )
    batch = GlobalBatch(
        sequence=job.sequence, batch=job.micro_batch, accumulate=job.micro_batches, replicas=replica.count
    )
    text = Batches(job.tokens.open(), batch, replica.index, job.seed)
    return lambda step: torch.cat(list(text.micro_batches(step * batch.sequences))).to(device)


def tokens_of(data: str, text_column: str, job: Job) -> TokenFile:
    """The text as tokens, of a tokenizer with at most as many as the model has embeddings; made once a machine."""
    options = TrainOptions(
        model="7b",  # a size, so the tokenizer is trained on the text
        data=None if data == "python" else data,
        text_column=text_column,
        vocabulary=min(job.architecture.vocabulary, 32000),
        cache=str(cache_folder()),
    )
    return prepare_tokens(options, lambda text: None)

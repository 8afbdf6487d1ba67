"""Steps of the model of `fp8booster train` in one process and in FP32, for benchmarks that look at what a run holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.model_folder import build_model, load_config
from fp8booster.cli.train.options import TrainOptions
from fp8booster.training.batches import Batches


class Step(NamedTuple):
    """A step that was taken."""

    number: int
    """From 1."""

    loss: float
    model: nn.Module
    optimizer: torch.optim.AdamW


def steps_in_fp32(options: TrainOptions, tokens: TokenFile, device: torch.device, count: int) -> Iterator[Step]:
    """Take so many steps; what is changed of the model after one is there in the next.

    Args:
        options: resolved.
    """
    batch = options.global_batch(1)
    batch.require(tokens.count)
    batches = Batches(tokens.open(), batch, 0, options.seed)
    torch.manual_seed(options.seed)
    config = load_config(options.model, options.vocabulary, options.sequence)
    model = build_model(options.model, config, device, checkpointing=False).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(1, count + 1):
        (ids,) = batches.micro_batches((number - 1) * batch.sequences)
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(number, loss.item(), model, optimizer)

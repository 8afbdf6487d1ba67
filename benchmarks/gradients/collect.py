"""Train the model of `fp8booster train` in one process and keep the gradients that each of several ranks would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.model_folder import build_model, load_config
from fp8booster.cli.train.options import TrainOptions
from fp8booster.training.batches import Batches
from fp8booster.training.optimizers import WarmupCosine


@dataclass(frozen=True)
class Bucket:
    """The gradients of one step as ZeRO sends them: the piece of every parameter for rank 0, then for rank 1, ..."""

    step: int
    loss: float
    names: Sequence[str]
    sizes: Sequence[int]
    """Values of each parameter's piece."""
    values: torch.Tensor
    """BF16 [ranks, ranks, part]: of each rank, the part for each rank."""


def collect(
    options: TrainOptions, tokens: TokenFile, device: torch.device, steps: Sequence[int], ranks: int
) -> Iterator[Bucket]:
    """Train up to the last of `steps` with FP8 products and exact means of gradients; give the bucket of each.

    `options` are resolved; its batch is that of one rank.
    """
    global_batch = options.global_batch(ranks)
    global_batch.require(tokens.count)
    schedule = WarmupCosine(peak=options.lr, floor=options.min_lr, warmup=options.warmup, decay=options.decay)
    ids = tokens.open()
    batches = [Batches(ids, global_batch, rank, options.seed) for rank in range(ranks)]
    torch.manual_seed(options.seed)
    config = load_config(options.model, options.vocabulary, options.sequence)
    model = build_model(options.model, config, device, checkpointing=False)
    convert_to_fp8(model, FP8Config())
    named = dict(model.named_parameters())
    masters = {name: parameter.detach().float() for name, parameter in named.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay)
    for step in range(1, max(steps) + 1):
        losses, gradients = [], []
        for rank in range(ranks):
            (batch,) = batches[rank].micro_batches((step - 1) * global_batch.sequences)
            batch = batch.to(device)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            losses.append(loss.item())
            gradients.append({name: parameter.grad for name, parameter in named.items()})
            model.zero_grad()
        if step in steps:
            yield _bucket(step, sum(losses) / ranks, gradients)
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        for name, master in masters.items():
            master.grad = torch.stack([own[name] for own in gradients]).float().mean(0)
        torch.nn.utils.clip_grad_norm_(masters.values(), options.max_norm)
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                named[name].copy_(master)


def training_options(model: str, steps: int, batch: int, sequence: int) -> TrainOptions:
    """The options of `fp8booster train` with its defaults for what is not given."""
    return resolve(TrainOptions(model=model, steps=steps, batch=batch, sequence=sequence), launched=False)


def _bucket(step: int, loss: float, gradients: Sequence[dict[str, torch.Tensor]]) -> Bucket:
    ranks = len(gradients)
    pieces = [
        [F.pad(gradient.flatten(), (0, -gradient.numel() % ranks)).view(ranks, -1) for gradient in own.values()]
        for own in gradients
    ]
    sizes = [piece.shape[1] for piece in pieces[0]]
    values = torch.stack([torch.cat(own, 1) for own in pieces])
    return Bucket(step, loss, list(gradients[0]), sizes, values)

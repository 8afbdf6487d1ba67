"""The loss of several models on the same tokens, and how far their predictions lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class Losses:
    """What a model made of some tokens."""

    loss: float
    """Mean negative log-likelihood of a token given those before it, in nats."""
    kl: float
    """Mean Kullback-Leibler divergence of its predictions from the first model's, in nats a token."""

    @property
    def perplexity(self) -> float:
        """E to the loss; infinity where a float does not reach."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@torch.no_grad()
def evaluate(models: Sequence[nn.Module], batches: Iterable[torch.Tensor]) -> list[Losses]:
    """The losses of each model, summed in float64.

    Args:
        models: causal language models of transformers, with one vocabulary, on one device.
        batches: token ids, [batch, sequence] each; the first token of a sequence is not predicted.
    """
    device = next(models[0].parameters()).device
    losses = torch.zeros(len(models), dtype=torch.float64, device=device)
    divergences = torch.zeros_like(losses)
    count = 0
    for batch in batches:
        ids = batch.to(device)
        logits = [model(input_ids=ids, use_cache=False).logits for model in models]
        for row in range(len(ids)):  # in FP32 the logits of one sequence at a time
            first = logits[0][row, :-1].float().log_softmax(-1)
            for number in range(len(models)):
                own = first if number == 0 else logits[number][row, :-1].float().log_softmax(-1)
                losses[number] -= own.gather(-1, ids[row, 1:, None]).double().sum()
                divergences[number] += (first.exp() * (first - own)).double().sum()
        count += ids[:, 1:].numel()
    return [
        Losses(loss / count, divergence / count)
        for loss, divergence in zip(losses.tolist(), divergences.tolist(), strict=True)
    ]

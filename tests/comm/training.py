"""A small regression that several ranks train together."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

STEPS = 30


def small_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8)
    )


def batches(rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's own inputs, and targets that a linear map gives."""
    truth = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS):
        x = torch.randn(64, 32, generator=generator)
        yield x, x @ truth


def losses_of(model: nn.Module) -> list[float]:
    """Train and return the loss of every step, the mean over ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for x, y in batches(dist.get_rank()):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def worst_difference(ours: list[float], plain: list[float]) -> float:
    """The largest relative difference of the losses of a step."""
    return max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))

"""Gradients that are sums over ranks, through backward passes that accumulate on them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.hybrid import sums

RANKS = 2


@pytest.fixture
def equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds the same part."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: RANKS)
    monkeypatch.setattr(
        sums.comm,
        "all_reduce_coalesced",
        lambda tensors, op, group, encoding: [tensor.mul_(RANKS) for tensor in tensors],
    )


@pytest.mark.parametrize("syncs", [(1, 1, 1), (1, 0, 1), (0, 0, 1), (1, 0, 0, 1), (1, 1, 0, 0, 0, 1)])
def test_each_backwards_part_is_added_once(equal_parts, syncs) -> None:
    """Whether ranks add after a backward, or leave that to a later one (`no_sync`)."""
    parameter = nn.Parameter(torch.zeros(3))
    summed = sums.SummedGradients("group", [parameter])
    parameter.grad = torch.zeros(3)
    for sync in syncs:
        summed.spread()
        parameter.grad += 1  # backward
        if sync:
            summed.sum()
    assert parameter.grad.tolist() == [float(RANKS * len(syncs))] * 3


def test_gradients_that_were_set_to_zero_are_not_divided(equal_parts) -> None:
    parameter = nn.Parameter(torch.zeros(3))
    summed = sums.SummedGradients("group", [parameter, nn.Parameter(torch.zeros(3))])
    parameter.grad = torch.ones(3)
    summed.sum()
    parameter.grad = None
    summed.spread()
    parameter.grad = torch.ones(3)
    summed.spread()
    assert parameter.grad.tolist() == [1.0] * 3

"""Amaxes of tensors that are spread over ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fp8booster.comm.transport import agree_on_amax, largest_of_each
from tests.distributed import ranks


@ranks(3)
def test_ranks_of_a_group_agree_on_the_largest_of_each_tensor() -> None:
    rank, group = dist.get_rank(), dist.new_group([1, 2])
    shards = [torch.tensor([1.0, -2.0 - rank]), torch.empty(0), torch.tensor([5.0 - rank])]
    if rank == 2:
        shards[1] = torch.tensor([-0.5])
    assert agree_on_amax(shards, None).tolist() == [4.0, 0.5, 5.0]
    if rank:
        assert agree_on_amax(shards, group).tolist() == [4.0, 0.5, 4.0]
        # what is known is taken for what it is, and of no other
        known = [None, torch.tensor(7.0 * rank), None]
        assert agree_on_amax(shards, group, known).tolist() == [4.0, 14.0, 4.0]
        known = [torch.tensor(0.25), None, torch.tensor(0.5)]
        assert agree_on_amax(shards, group, known).tolist() == [0.25, 0.5, 0.5]


@ranks(2)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_not_finite_on_one_rank_is_infinite_on_all(bad: float, is_known: bool) -> None:
    shards = [torch.ones(4), torch.ones(4)]
    if dist.get_rank() == 1:
        shards[1][2] = bad
    known = [each.abs().max() for each in shards] if is_known else None
    assert agree_on_amax(shards, None, known).tolist() == [1.0, math.inf]


def test_weights_that_share_a_scale_have_the_largest_of_theirs() -> None:
    amaxes = torch.tensor([1.0, 5.0, 3.0, 2.0, math.inf, 4.0])
    first = torch.tensor([0, 1, 0, 1, 4, 4])
    assert largest_of_each(amaxes, first).tolist() == [3.0, 5.0, 3.0, 5.0, math.inf, math.inf]
    alone = torch.arange(6)
    assert torch.equal(largest_of_each(amaxes, alone), amaxes)
    assert largest_of_each(torch.zeros(3), torch.tensor([0, 0, 2])).tolist() == [0.0] * 3

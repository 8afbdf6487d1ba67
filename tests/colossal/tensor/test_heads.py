"""Parts of a sequence exchanged for heads, against Colossal-AI's exchange of each kind of heads by itself."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.monitor.traffic import count_traffic
from tests.colossal.tensor.models import AXIS, mesh
from tests.distributed import ranks
from tests.nn.reference import signal_to_noise

TOKENS, SIZE = 16, 32
"""Of a rank, and of a head."""

KINDS = (8, 2, 2)
"""Heads of queries, keys and values."""

FP8_DB = 30
"""E4M3 under a scale for each 256 normal values; 3 bits of mantissa make 31.5."""


@functools.cache
def plain_group() -> dist.ProcessGroup:
    """One that was not given to `compress_groups`."""
    return dist.new_group([0, 1])


def compressed_group() -> dist.ProcessGroup:
    return mesh(compressed=True).get_group_along_axis(AXIS)


def values(*shape: int) -> torch.Tensor:
    """Others on each rank."""
    torch.manual_seed(dist.get_rank())
    return torch.randn(shape).bfloat16()


def native(tensor: torch.Tensor, group: dist.ProcessGroup, *dimensions: int) -> torch.Tensor:
    """By shardformer, on features [B, S, H * D]."""
    from colossalai.shardformer.layer._operation import all_to_all_comm

    return all_to_all_comm(tensor.flatten(2), group, *dimensions).unflatten(2, (-1, SIZE))


@ranks(2)
@pytest.mark.parametrize("batch", [1, 3])
def test_all_kinds_at_once_give_what_native_gives_one_by_one(batch: int) -> None:
    from fp8booster.colossal.tensor.attention import sequence_to_heads

    group = plain_group()
    whole = values(batch, TOKENS, sum(KINDS), SIZE).requires_grad_()
    parts = [kind.detach().clone().requires_grad_() for kind in whole.split(KINDS, 2)]
    found = sequence_to_heads(whole, KINDS, group)
    expected = torch.cat([native(part, group) for part in parts], 2)
    assert found.shape == (batch, 2 * TOKENS, sum(KINDS) // 2, SIZE)
    assert found.is_contiguous()
    assert torch.equal(found, expected)
    gradient = values(*found.shape)
    found.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(whole.grad, torch.cat([part.grad for part in parts], 2))


@ranks(2)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_way_back_is_natives(batch: int) -> None:
    from fp8booster.colossal.tensor.attention import heads_to_sequence

    group = plain_group()
    attended = values(batch, 4, 2 * TOKENS, SIZE).requires_grad_()  # attention gives heads before tokens
    twin = attended.detach().clone().requires_grad_()
    found = heads_to_sequence(attended.transpose(1, 2), group)
    expected = native(twin.transpose(1, 2), group, 1, 2)
    assert found.shape == (batch, TOKENS, 8, SIZE)
    assert torch.equal(found, expected)
    gradient = values(*found.shape)
    found.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(attended.grad, twin.grad)


@ranks(2)
def test_a_compressed_group_sends_one_message_in_fp8_each_way() -> None:
    from fp8booster.colossal.tensor.attention import sequence_to_heads

    whole = values(2, TOKENS, sum(KINDS), SIZE).requires_grad_()
    exact = whole.detach().clone().requires_grad_()
    comm.reset_statistics()
    with count_traffic() as traffic:
        found = sequence_to_heads(whole, KINDS, compressed_group())
        gradient = values(*found.shape)
        found.backward(gradient)
    assert {(name, dtype, count.calls) for (name, dtype), count in traffic.counts.items()} == {
        ("all_to_all_single", torch.uint8, 2)
    }
    (row,) = comm.statistics().rows.values()
    assert row.calls == 2
    assert not row.uncompressed
    assert row.ratio < 0.52
    expected = sequence_to_heads(exact, KINDS, plain_group())
    expected.backward(gradient)
    assert signal_to_noise(expected, found) > FP8_DB
    assert signal_to_noise(exact.grad, whole.grad) > FP8_DB


@ranks(2)
def test_heads_that_ranks_cannot_share_are_refused() -> None:
    from fp8booster.colossal.tensor.attention import sequence_to_heads

    with pytest.raises(ValueError, match=r"3 attention heads cannot be shared among 2 .* take an sp_size"):
        sequence_to_heads(values(1, TOKENS, 12, SIZE), (6, 3, 3), plain_group())

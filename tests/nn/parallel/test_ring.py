"""What every rank runs: attention over a sequence that is spread over ranks against attention over all of it."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8booster import comm
from fp8booster.comm.encoding import DEFAULT
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.parallel import ring_attention as ring_module
from fp8booster.nn.parallel.ring_attention import KEYS_AND_VALUES, ring_attention
from tests.distributed import ranks
from tests.nn.reference import signal_to_noise

BATCH, HEADS, LENGTH, SIZE = 2, 4, 64, 32
WIRE_DB = 25
"""Keys, values and their gradients are rounded to E4M3 once, which makes 31.6 dB of each."""


def chunks(tensor: torch.Tensor, length: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's two chunks of the first tokens, [B, H, length, D]."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = tensor[:, :, :length].chunk(2 * ranks, 2)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), 2)


def tensors() -> list[torch.Tensor]:
    """q, k, v and the output's gradient over the whole sequence."""
    return list(torch.randn(4, BATCH, HEADS, LENGTH, SIZE).unbind())


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor, scale: float | None = None
) -> list[torch.Tensor]:
    """Output and gradients over the whole sequence."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True, scale=scale)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def log_sum_exp(q: torch.Tensor, k: torch.Tensor, scale: float = SIZE**-0.5) -> torch.Tensor:
    """Of the scores over the whole sequence, [B, H, S, 1]."""
    length = q.shape[2]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (q @ k.transpose(2, 3) * scale).masked_fill(future, -torch.inf).logsumexp(3, keepdim=True)


def found(
    whole: list[torch.Tensor], communication: bool, group: dist.ProcessGroup | None = None, **options: object
) -> list[torch.Tensor]:
    """This rank's output and gradients, and the log-sum-exp of its scores."""
    *leaves, dy = (chunks(tensor, LENGTH, group) for tensor in whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y, lse = ring_attention(*leaves, group or dist.group.WORLD, encoding=DEFAULT if communication else None, **options)
    assert not lse.requires_grad
    assert lse.dtype is torch.float32
    return [y.detach(), *torch.autograd.grad(y, leaves, dy), lse]


@ranks(2, 4)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_a_ring_attends_as_one_process_does(scale: float | None) -> None:
    whole = tensors()
    lse = log_sum_exp(*whole[:2], SIZE**-0.5 if scale is None else scale)
    references = [chunks(tensor, LENGTH) for tensor in expected(*whole, scale)] + [chunks(lse, LENGTH)[..., 0]]
    results = [found(whole, communication, scale=scale) for communication in (False, True)]
    for reference, exact, in_fp8 in zip(references, *results, strict=True):
        torch.testing.assert_close(exact, reference, rtol=1e-4, atol=1e-5)
        assert signal_to_noise(reference, in_fp8) > WIRE_DB


@ranks(4)
def test_rings_of_some_ranks_attend_to_their_own_sequences() -> None:
    """Ranks 1 and 3 have another sequence than 0 and 2, and other numbers than in their ring."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    torch.manual_seed(dist.get_rank() % 2)
    whole = tensors()
    references = [chunks(tensor, LENGTH, group) for tensor in expected(*whole)]
    boundaries = [0, LENGTH, 2 * LENGTH]
    for options in ({}, {"boundaries": boundaries}):
        for reference, result in zip(references, found(whole, False, group, **options)[:4], strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5)


@ranks(4)
def test_16_bit_blocks_are_joined_in_fp32() -> None:
    """Measured on the last rank, which joins most: 51.8 dB, and 48.8 where what is joined has 16 bits."""
    whole = [tensor.bfloat16() for tensor in tensors()]
    y, *_, lse = found(whole, False)
    wide = [tensor.float() for tensor in whole]
    if dist.get_rank() == 3:
        assert y.dtype is torch.bfloat16
        assert signal_to_noise(chunks(expected(*wide)[0], LENGTH), y) > 50.3
    torch.testing.assert_close(lse, chunks(log_sum_exp(*wide[:2]), LENGTH)[..., 0], rtol=1e-2, atol=1e-2)


@ranks(4)
@pytest.mark.parametrize("packed", [False, True])
def test_16_bit_gradients_of_blocks_are_added_in_fp32(packed: bool) -> None:
    """Each block gives 1, and those of a chunk with itself 256, to which BF16 adds no 1."""

    def gradients_of_block(*of_block: torch.Tensor | bool | float) -> tuple[torch.Tensor, ...]:
        _, q, _, _, k, v, causal, _ = of_block
        return tuple(torch.full_like(each, 256 if causal else 1) for each in (q, k, v))

    whole = [tensor.bfloat16() for tensor in tensors()]
    options = {"boundaries": [0, LENGTH, 2 * LENGTH]} if packed else {}
    with mock.patch.object(ring_module, "attend_backward", gradients_of_block):
        _, *gradients, _ = found(whole, False, **options)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # blocks that the queries, and the keys, of the rank's two chunks take part in besides that of 256
    if packed:  # of chunk and chunk
        of_queries, of_keys = (rank, 2 * ranks - 1 - rank), (2 * ranks - 1 - rank, rank)
    else:  # of rank and rank
        of_queries, of_keys = (rank, ranks - 1), (ranks - 1, rank)
    for gradient, counts in zip(gradients, (of_queries, of_keys, of_keys), strict=True):
        right = torch.tensor(counts, dtype=torch.float32).add(256).bfloat16()
        for half, value in zip(gradient.chunk(2, 2), right, strict=True):
            assert torch.equal(half, value.expand_as(half))


@ranks(2, 4)
def test_heads_that_queries_share_travel_once() -> None:
    q, k, v, dy = tensors()
    grouped = [q, k[:, ::2], v[:, ::2], dy]  # two queries to each
    repeated = [q, *(each.repeat_interleave(2, 1) for each in grouped[1:3]), dy]
    y, dq, *shared = expected(*repeated)
    references = [y, dq, *(each.unflatten(1, (HEADS // 2, 2)).sum(2) for each in shared)]
    results = []
    for communication in (False, True):
        comm.reset_statistics()
        results.append(found(grouped, communication)[:4])
    sent = comm.statistics()
    for reference, exact, in_fp8 in zip(references, *results, strict=True):
        own = chunks(reference, LENGTH)
        torch.testing.assert_close(exact, own, rtol=1e-4, atol=1e-5)
        assert signal_to_noise(own, in_fp8) > WIRE_DB
    comm.reset_statistics()
    found(repeated, True)
    for row in (KEYS_AND_VALUES, "send"):
        assert 2 * sent[row].raw_bytes == comm.statistics()[row].raw_bytes > 0


@ranks(2, 4)
def test_padded_sequences_attend_to_themselves_alone() -> None:
    whole, lengths = tensors(), (LENGTH, LENGTH // 2)
    share = [length // dist.get_world_size() for length in lengths]
    inputs = []
    for tensor in whole:
        rows = [chunks(tensor[row : row + 1], length) for row, length in enumerate(lengths)]
        inputs.append(torch.cat([F.pad(row, (0, 0, 0, share[0] - row.shape[2])) for row in rows]))
    *leaves, dy = inputs
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y, lse = ring_attention(*leaves, dist.group.WORLD, lengths=share, scale=0.5, encoding=None)
    results = [y.detach(), *torch.autograd.grad(y, leaves, dy), lse.unsqueeze(3)]
    for row, length in enumerate(lengths):
        of_row = [tensor[row : row + 1, :, :length] for tensor in whole]
        for reference, result in zip([*expected(*of_row, 0.5), log_sum_exp(*of_row[:2], 0.5)], results, strict=True):
            own = result[row : row + 1, :, : share[row]]
            torch.testing.assert_close(own, chunks(reference, length), rtol=1e-4, atol=1e-5)
            assert not result[row, :, share[row] :].any()


@ranks(2, 4)
def test_sequences_without_padding_are_sent_as_without_lengths() -> None:
    whole, sent = tensors(), []
    for options in ({}, {"lengths": [LENGTH // dist.get_world_size()] * BATCH}):
        comm.reset_statistics()
        found(whole, True, **options)
        sent.append(comm.statistics()["send"].raw_bytes)
    assert sent[0] == sent[1]


@ranks(2)
def test_a_sequence_without_a_token_is_left_out() -> None:
    whole = [tensor[:, :, : LENGTH // 2] for tensor in tensors()]
    *leaves, dy = (chunks(tensor, LENGTH // 2) for tensor in whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y, lse = ring_attention(*leaves, dist.group.WORLD, lengths=[LENGTH // 4, 0], encoding=None)
    references = expected(*(tensor[:1] for tensor in whole))
    for reference, result in zip(references, [y.detach(), *torch.autograd.grad(y, leaves, dy)], strict=True):
        torch.testing.assert_close(result[:1], chunks(reference, LENGTH // 2), rtol=1e-4, atol=1e-5)
        assert not result[1].any()
    assert not lse[1].any()


@ranks(2, 4)
@pytest.mark.parametrize("lengths", [(LENGTH, 40, 24), (1, 2, 30, 31, 5, 16, 43), (3, 61, LENGTH)])
def test_packed_sequences_attend_to_themselves_alone(lengths: tuple[int, ...]) -> None:
    boundaries = [sum(lengths[:number]) for number in range(len(lengths) + 1)]  # over both rows
    whole = tensors()
    references = [torch.zeros_like(each) for each in (*whole, whole[0][..., :1])]
    for begin, end in pairwise(boundaries):
        row, start = divmod(begin, LENGTH)
        part = slice(row, row + 1), slice(None), slice(start, start + end - begin)
        of_part = [tensor[part] for tensor in whole]
        for reference, values in zip(
            references, [*expected(*of_part, 0.5), log_sum_exp(*of_part[:2], 0.5)], strict=True
        ):
            reference[part] = values
    *leaves, dy = (chunks(tensor, LENGTH) for tensor in whole)
    for communication in (False, True):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        options = {"boundaries": boundaries, "scale": 0.5, "encoding": DEFAULT if communication else None}
        y, lse = ring_attention(*leaves, dist.group.WORLD, **options)
        assert lse.isfinite().all()
        results = [y.detach(), *torch.autograd.grad(y, leaves, dy), lse.unsqueeze(3)]
        for reference, value in zip(references, results, strict=True):
            if communication:
                assert signal_to_noise(chunks(reference, LENGTH), value) > WIRE_DB
            else:
                torch.testing.assert_close(value, chunks(reference, LENGTH), rtol=1e-4, atol=1e-5)


@ranks(2, 4)
@pytest.mark.parametrize("packed", [False, True])
def test_keys_values_and_their_gradients_travel_in_bytes_of_16_bit_tensors(packed: bool) -> None:
    whole = [tensor.bfloat16() for tensor in tensors()]
    options = {"boundaries": [0, LENGTH, 2 * LENGTH]} if packed else {}
    with count_traffic() as traffic:
        found(whole, True, **options)
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}
    statistics = comm.statistics()
    for row in (statistics[KEYS_AND_VALUES], statistics["send"]):
        assert row.calls
        assert row.ratio < 0.52, row
        assert not row.uncompressed
    others, of_pair = dist.get_world_size() - 1, 2 * whole[1].nbytes // dist.get_world_size()
    assert statistics[KEYS_AND_VALUES].raw_bytes == 2 * others * of_pair  # in forward, and again in backward
    # of an earlier rank's keys those of its first chunk alone
    assert statistics["send"].raw_bytes == others * of_pair - dist.get_rank() * of_pair // 2
    comm.reset_statistics()
    found(whole, False, **options)
    assert comm.statistics()[KEYS_AND_VALUES].uncompressed == {"small": 2 * (dist.get_world_size() - 1)}


@ranks(2, 4)
def test_an_odd_number_of_tokens_is_refused() -> None:
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(ValueError, match="a rank holds 3 tokens of a sequence; pad sequences to a multiple of"):
        ring_attention(q, q, q, dist.group.WORLD)
    with pytest.raises(ValueError, match="a rank holds 1 tokens of a sequence"):
        ring_attention(*[torch.randn(2, 1, 4, 8)] * 3, dist.group.WORLD, lengths=[4, 1])
    with pytest.raises(ValueError, match="give lengths or boundaries, not both"):
        ring_attention(q, q, q, dist.group.WORLD, lengths=[3], boundaries=[0, 6])

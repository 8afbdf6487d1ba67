"""What every rank runs: attention over a sequence that is spread over ranks against attention over all of it."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fp8booster import comm
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.parallel.ring_attention import KEYS_AND_VALUES, ring_attention
from tests.distributed import ranks
from tests.nn.reference import signal_to_noise

BATCH, HEADS, LENGTH, SIZE = 2, 4, 64, 32
WIRE_DB = 25
"""Keys, values and their gradients are rounded to E4M3 once, which makes 31.6 dB of each."""


def chunks(tensor: torch.Tensor, length: int) -> torch.Tensor:
    """This rank's two chunks of the first tokens, [B, H, length, D]."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    parts = tensor[:, :, :length].chunk(2 * ranks, 2)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), 2)


def tensors() -> list[torch.Tensor]:
    """q, k, v and the output's gradient over the whole sequence."""
    return list(torch.randn(4, BATCH, HEADS, LENGTH, SIZE).unbind())


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients over the whole sequence."""
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def found(whole: list[torch.Tensor], communication: bool) -> list[torch.Tensor]:
    """This rank's output and gradients."""
    *leaves, dy = (chunks(tensor, LENGTH) for tensor in whole)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y, _ = ring_attention(*leaves, dist.group.WORLD, communication=communication)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@ranks(2, 4)
def test_a_ring_attends_as_one_process_does() -> None:
    whole = tensors()
    references = [chunks(tensor, LENGTH) for tensor in expected(*whole)]
    for reference, exact, in_fp8 in zip(references, found(whole, False), found(whole, True), strict=True):
        torch.testing.assert_close(exact, reference, rtol=1e-4, atol=1e-5)
        assert signal_to_noise(reference, in_fp8) > WIRE_DB


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
        results.append(found(grouped, communication))
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
def test_the_log_sum_exp_is_that_of_all_scores() -> None:
    q, k, v, _ = tensors()
    _, lse = ring_attention(*(chunks(each, LENGTH) for each in (q, k, v)), dist.group.WORLD)
    scores = (q @ k.transpose(2, 3) * SIZE**-0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    whole = scores.logsumexp(3, keepdim=True)
    torch.testing.assert_close(lse, chunks(whole, LENGTH)[..., 0], rtol=0.02, atol=0.02)


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
    y, _ = ring_attention(*leaves, dist.group.WORLD, lengths=share, communication=False)
    results = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for row, length in enumerate(lengths):
        references = expected(*(tensor[row : row + 1, :, :length] for tensor in whole))
        for reference, result in zip(references, results, strict=True):
            own = result[row : row + 1, :, : share[row]]
            torch.testing.assert_close(own, chunks(reference, length), rtol=1e-4, atol=1e-5)
            assert not result[row, :, share[row] :].any()


@ranks(2, 4)
@pytest.mark.parametrize("lengths", [(LENGTH, 40, 24), (1, 2, 30, 31, 5, 16, 43), (3, 61, LENGTH)])
def test_packed_sequences_attend_to_themselves_alone(lengths: tuple[int, ...]) -> None:
    boundaries = [sum(lengths[:number]) for number in range(len(lengths) + 1)]  # over both rows
    whole = tensors()
    references = [torch.zeros_like(each) for each in whole]
    for begin, end in pairwise(boundaries):
        row, start = divmod(begin, LENGTH)
        part = slice(row, row + 1), slice(None), slice(start, start + end - begin)
        for reference, values in zip(references, expected(*(tensor[part] for tensor in whole)), strict=True):
            reference[part] = values
    *leaves, dy = (chunks(tensor, LENGTH) for tensor in whole)
    for communication in (False, True):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y, _ = ring_attention(*leaves, dist.group.WORLD, boundaries=boundaries, communication=communication)
        for reference, value in zip(references, [y.detach(), *torch.autograd.grad(y, leaves, dy)], strict=True):
            if communication:
                assert signal_to_noise(chunks(reference, LENGTH), value) > WIRE_DB
            else:
                torch.testing.assert_close(value, chunks(reference, LENGTH), rtol=1e-4, atol=1e-5)


@ranks(2, 4)
def test_keys_values_and_their_gradients_travel_in_bytes_of_16_bit_tensors() -> None:
    whole = [tensor.bfloat16() for tensor in tensors()]
    with count_traffic() as traffic:
        found(whole, True)
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}
    statistics = comm.statistics()
    for row in (statistics[KEYS_AND_VALUES], statistics["send"]):
        assert row.calls
        assert row.ratio < 0.52, row
        assert not row.uncompressed
    comm.reset_statistics()
    found(whole, False)
    assert comm.statistics()[KEYS_AND_VALUES].uncompressed == {"small": 2 * (dist.get_world_size() - 1)}


@ranks(2, 4)
def test_an_odd_number_of_tokens_is_refused() -> None:
    q = torch.randn(1, 1, 3, 8)
    with pytest.raises(ValueError, match="a rank holds 3 tokens of a sequence; pad sequences to a multiple of"):
        ring_attention(q, q, q, dist.group.WORLD)
    with pytest.raises(ValueError, match="give lengths or boundaries, not both"):
        ring_attention(q, q, q, dist.group.WORLD, lengths=[3], boundaries=[0, 6])

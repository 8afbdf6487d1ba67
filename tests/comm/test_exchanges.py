"""All-to-alls."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from tests.comm import harness
from tests.comm.bounds import assert_within, block_amax, rounding_bound
from tests.comm.harness import cases, finish, of_all_ranks, rank_test, sent_bound, spread


@rank_test
def test_all_to_all_single_with_even_splits_is_within_one_rounding() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype, encoding, asynchronous in cases():
        values = spread(ranks * size * 3, dtype).view(ranks * size, 3)
        everyone = of_all_ranks(values)
        output = torch.empty_like(values)
        finish(comm.all_to_all_single(output, values, async_op=asynchronous, encoding=encoding, min_bytes=0))
        for sender, got in enumerate(output.chunk(ranks)):
            sent = everyone[sender].view(-1)
            bound = sent_bound(sent, encoding, ranks).chunk(ranks)[rank]
            assert_within(got.reshape(-1), sent.chunk(ranks)[rank], bound)


def split_sizes(sender: int, ranks: int, largest: int) -> list[int]:
    """Uneven, some of them empty."""
    return [(sender * 7 + receiver * 11) % 4 * largest // 3 for receiver in range(ranks)]


@rank_test
def test_all_to_all_single_with_uneven_and_empty_splits_is_within_one_rounding() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype, encoding, asynchronous in cases():
        sends = [split_sizes(sender, ranks, size) for sender in range(ranks)]
        values = spread(2 * sum(sends[rank]), dtype).view(-1, 2)
        receives = [sends[sender][rank] for sender in range(ranks)]
        output = torch.empty(sum(receives), 2, dtype=dtype, device=harness.DEVICE)
        everyone = of_all_ranks(values)
        finish(comm.all_to_all_single(output, values, receives, sends[rank], async_op=asynchronous, encoding=encoding))
        for sender, got in enumerate(output.split(receives)):
            counts = [2 * rows for rows in sends[sender]]
            sent = everyone[sender].view(-1)
            if not sent.numel():
                continue
            bound = rounding_bound(sent, block_amax(sent, counts, encoding.block_size), encoding)
            assert_within(got.reshape(-1), sent.split(counts)[rank], bound.split(counts)[rank])


@rank_test
def test_all_to_all_of_nothing_at_all() -> None:
    ranks = dist.get_world_size()
    output = torch.empty(0, 4, device=harness.DEVICE)
    comm.all_to_all_single(output, torch.empty(0, 4, device=harness.DEVICE), [0] * ranks, [0] * ranks)
    assert output.shape == (0, 4)


@rank_test
def test_all_to_all_is_within_one_rounding() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype, encoding, asynchronous in cases():
        sends = [split_sizes(sender, ranks, size) for sender in range(ranks)]
        inputs = [spread(count, dtype) for count in sends[rank]]
        outputs = [torch.empty(sends[sender][rank], dtype=dtype, device=harness.DEVICE) for sender in range(ranks)]
        everyone = of_all_ranks(torch.cat(inputs))
        finish(comm.all_to_all(outputs, inputs, async_op=asynchronous, encoding=encoding))
        for sender, got in enumerate(outputs):
            sent = everyone[sender].split(sends[sender])[rank]
            if sent.numel():
                assert_within(got, sent, sent_bound(sent, encoding))


@rank_test
def test_all_to_all_single_without_splits_divides_values_whatever_the_shape() -> None:
    ranks = dist.get_world_size()
    for shape in ((1, 2 * ranks, 8), (ranks + 1, ranks), (2 * ranks,), (3, ranks, 1)):
        count = math.prod(shape)
        values = (torch.arange(count, device=harness.DEVICE) % 5 * 2.0 + dist.get_rank()).view(shape)
        for min_bytes in (0, 2**30):
            ours, torchs = torch.empty_like(values), torch.empty_like(values)
            comm.all_to_all_single(ours, values, min_bytes=min_bytes)
            dist.all_to_all_single(torchs.view(-1), values.view(-1))  # PyTorch 2.14 divides a first dimension alone
            torch.testing.assert_close(ours, torchs, rtol=2**-4, atol=0.05)


@rank_test
def test_rows_and_splits_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    ranks = dist.get_world_size()
    ones, wrong = [1] * ranks, [-1, 3, *[1] * (ranks - 2)]
    for width in (7, 512):
        x = torch.ones(ranks, width, device=harness.DEVICE)
        for output, splits, refused in (
            (torch.empty(ranks, 2 * width), (ones, ones), "as many values in each row"),
            (torch.empty(ranks, width), (ones, wrong), "input_split_sizes .* none below zero"),
            (torch.empty(ranks, width), (wrong, ones), "output_split_sizes .* none below zero"),
            (torch.empty(ranks, width), (ones[1:], ones), "output_split_sizes .* one for each rank"),
        ):
            with pytest.raises(ValueError, match=refused):
                comm.all_to_all_single(output.to(harness.DEVICE), x, *splits)
        with pytest.raises(TypeError, match=r"input_split_sizes .* whole numbers"):
            comm.all_to_all_single(torch.empty_like(x), x, ones, [1.0] * ranks)
        if dist.get_rank():  # all goes to the first rank, and others give any tensor without values
            comm.all_to_all_single(x.new_empty(0), x, [0] * ranks, [ranks, *[0] * (ranks - 1)])
        else:
            output = x.new_empty(ranks * ranks, width)
            comm.all_to_all_single(output, x, [ranks] * ranks, [ranks, *[0] * (ranks - 1)])
            assert torch.equal(output, torch.ones_like(output))
    with pytest.raises(ValueError, match="one dimension or more"):
        comm.all_to_all_single(x[0, 0].clone(), x[0, 0].clone(), ones, ones)

"""What tests of collectives start from: the ranks that they run on, cases and bounds."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.distributed as dist

from fp8booster import comm, formats
from fp8booster.comm import Encoding
from fp8booster.kernels.alignment import aligned
from tests.comm.bounds import assert_within, block_amax, rounding_bound
from tests.distributed import ranks

TESTS: dict[str, Callable[[], None]] = {}
"""What `rank_test` decorates, for `test_gpu` to run over NCCL."""

DEVICE = torch.device("cpu")
"""`test_gpu` sets it; read it as `harness.DEVICE`."""

SIZES = (1, 2, 15, 17, 100, 255, 1000, 4099)
ENCODINGS = (
    Encoding(),
    Encoding(format=formats.E5M2, block_size=32),
    Encoding(block_size=None),
    Encoding(block_size=1024, power_of_two=True),
)
LARGE = 1 << 18


def rank_test(function: Callable[[], None]) -> Callable[..., None]:
    """The decorated test runs on 2, 3 and 4 ranks of gloo, each with random values of its own, and in `test_gpu`."""

    @functools.wraps(function)
    def seeded() -> None:
        torch.manual_seed(1000 + dist.get_rank())
        function()

    TESTS[function.__name__] = seeded
    return ranks(2, 3, 4)(seeded)


def spread(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of both signs over several orders of magnitude, as gradients are."""
    return (torch.randn(count) * torch.exp(torch.randn(count))).to(dtype).to(DEVICE)


def of_all_ranks(values: torch.Tensor) -> list[torch.Tensor]:
    """Each rank's values, exactly."""
    gathered: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values.double().cpu())
    return [each.to(DEVICE) for each in gathered]


def assert_same_on_all_ranks(values: torch.Tensor) -> None:
    """Bit for bit."""
    gathered: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, values.cpu())
    for other in gathered:
        assert torch.equal(bits(other), bits(values.cpu()))


def bits(values: torch.Tensor) -> torch.Tensor:
    """What is stored, so that NaN equals NaN."""
    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def finish(work: object) -> None:
    """Wait for what may be a handle."""
    if work is not None:
        work.wait()


def cases() -> Iterator[tuple[int, torch.dtype, Encoding, bool]]:
    """(size, dtype, encoding, asynchronous): every pair of settings at some size, every size with some settings."""
    for (size, dtype), (encoding, asynchronous) in zip(
        product(SIZES, formats.HIGH_PRECISION), product(ENCODINGS * 3, (False, True)), strict=True
    ):
        yield size, dtype, encoding, asynchronous


def sent_bound(values: torch.Tensor, encoding: Encoding, pieces: int = 1, count: int | None = None) -> torch.Tensor:
    """`rounding_bound` of values sent in even pieces."""
    counts = [count or math.ceil(values.numel() / pieces)] * pieces
    return rounding_bound(values, block_amax(values, counts, encoding.block_size), encoding)


def assert_reduced(
    actual: torch.Tensor,
    everyone: list[torch.Tensor],
    encoding: Encoding = comm.Encoding(),  # noqa: B008 (frozen)
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """What all_reduce gives lies within one rounding of each rank's values and one of their sum."""
    ranks = len(everyone)
    counts = [aligned(math.ceil(everyone[0].numel() / ranks))] * ranks
    factor = 1 / ranks if op == dist.ReduceOp.AVG else 1
    exact = sum(everyone) * factor
    first = sum(sent_bound(each, encoding, ranks, counts[0]) for each in everyone) * factor
    largest = exact.abs() + first
    # with one scale a tensor, each rank's piece of the sum has its own
    amax = block_amax(largest, counts, encoding.block_size or counts[0])
    assert_within(actual, exact, first + rounding_bound(largest, amax, encoding))

"""What every rank runs: each function checks one property of `fp8booster.comm` against `torch.distributed`."""

from __future__ import annotations

import faulthandler
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fp8booster import comm, formats
from fp8booster.comm import Encoding
from fp8booster.comm.one_sided import mailbox_of
from fp8booster.comm.threshold import MINIMUM_BYTES, ON_THE_CPU
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.operators import Operator
from fp8booster.monitor.traffic import count_traffic
from tests.comm.bounds import assert_within, block_amax, rounding_bound

CHECKS: dict[str, Callable[[], None]] = {}
SIZES = (1, 2, 15, 17, 100, 255, 1000, 4099)
ENCODINGS = (
    Encoding(),
    Encoding(format=formats.E5M2, block_size=32),
    Encoding(block_size=None),
    Encoding(block_size=1024, power_of_two=True),
)
LARGE = 1 << 18
SECONDS = 60
"""What a check lasts at most."""


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def run_checks(device: str = "cpu") -> dict[str, str | None]:
    """Run the checks on this rank, up to the first that fails: name to None, or to what went wrong.

    A rank that stops closes its connections, so that the others, which may wait for it, fail at once.
    """
    global DEVICE
    DEVICE = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    outcomes: dict[str, str | None] = dict.fromkeys(CHECKS, "not run: a check before it failed")
    for name, function in CHECKS.items():
        torch.manual_seed(1000 + dist.get_rank())
        comm.reset_statistics()
        # over NCCL ranks that miss each other hang: say where, and end
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            function()
            dist.barrier()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
            # at once: over NCCL the other ranks may wait for this one until they are killed
            sys.stderr.write(f"rank {dist.get_rank()}: {name}\n{outcomes[name]}\n")
            break
        finally:
            faulthandler.cancel_dump_traceback_later()
    return outcomes


DEVICE = torch.device("cpu")


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


@check
def all_reduce_is_within_two_roundings() -> None:
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        finish(comm.all_reduce(values, op, async_op=asynchronous, encoding=encoding, min_bytes=0))
        assert_reduced(values, everyone, encoding, op)
        assert_same_on_all_ranks(values)


@check
def all_reduce_of_many_dimensions_and_of_a_parameter() -> None:
    parameter = torch.nn.Parameter(spread(6 * 35).view(6, 5, 7))
    everyone = of_all_ranks(parameter.detach().view(-1))
    comm.all_reduce(parameter, min_bytes=0)
    assert parameter.shape == (6, 5, 7)
    assert_reduced(parameter.detach().view(-1), everyone)


@check
def results_repeat_bit_for_bit() -> None:
    values = spread(5003, torch.bfloat16)
    first = values.clone()
    comm.all_reduce(first, min_bytes=0)
    for _ in range(10):
        again = values.clone()
        comm.all_reduce(again, min_bytes=0)
        assert torch.equal(again, first)


@check
def reduce_scatter_is_within_one_rounding_of_each_rank() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        values = spread(size * ranks, dtype)
        everyone = of_all_ranks(values)
        factor = 1 / ranks if op == dist.ReduceOp.AVG else 1
        exact = sum(everyone) * factor
        bound = sum(sent_bound(each, encoding, ranks) for each in everyone) * factor
        output = torch.empty(size, dtype=dtype, device=DEVICE)
        finish(comm.reduce_scatter_tensor(output, values, op, async_op=asynchronous, encoding=encoding, min_bytes=0))
        mine = slice(rank * size, (rank + 1) * size)
        assert_within(output, exact[mine], bound[mine])


@check
def reduce_scatter_of_many_is_that_of_each_into_fp32_too() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sizes = (256, 1024, 7, 300)
    for dtype, encoding, op in product(formats.HIGH_PRECISION, ENCODINGS, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        tensors = [spread(size * ranks, dtype).view(ranks, size) for size in sizes]
        side_by_side = torch.cat(tensors, dim=1)
        exact = torch.empty(sum(sizes), device=DEVICE)
        comm.reduce_scatter_tensor(
            exact, side_by_side.float().view(-1), op, encoding=encoding, min_bytes=0
        )  # 16 bits in FP32: the same values
        for output_dtype in (torch.float32, dtype):
            output = torch.empty(sum(sizes), dtype=output_dtype, device=DEVICE)
            comm.reduce_scatter_coalesced(output, tensors, op, encoding=encoding, min_bytes=0)
            assert torch.equal(output, exact.to(output_dtype))
        plain = torch.empty(sum(sizes), device=DEVICE)
        comm.reduce_scatter_coalesced(plain, tensors, op, min_bytes=2**30)
        factor = 1 / ranks if op == dist.ReduceOp.AVG else 1
        mine = sum(each[rank] for each in of_all_ranks(side_by_side)) * factor
        torch.testing.assert_close(plain.double(), mine, rtol=ranks * torch.finfo(dtype).eps, atol=0.1)
    row = comm.statistics()["reduce_scatter_tensor"]
    assert row.uncompressed == {"small": row.calls // 4}


@check
def all_gather_into_tensor_is_within_one_rounding() -> None:
    ranks = dist.get_world_size()
    for size, dtype, encoding, asynchronous in cases():
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        before = values.clone()
        output = torch.empty(ranks, size, dtype=dtype, device=DEVICE)
        finish(comm.all_gather_into_tensor(output, values, async_op=asynchronous, encoding=encoding, min_bytes=0))
        for got, exact in zip(output, everyone, strict=True):
            assert_within(got, exact, sent_bound(exact, encoding))
        assert_same_on_all_ranks(output)
        assert torch.equal(values, before)


@check
def all_gather_into_tensor_works_in_place() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    output = spread(ranks * 700)
    own = output.view(ranks, 700)[rank]
    everyone = of_all_ranks(own)
    comm.all_gather_into_tensor(output, own, min_bytes=0)
    for got, exact in zip(output.view(ranks, 700), everyone, strict=True):
        assert_within(got, exact, sent_bound(exact, Encoding()))


@check
def all_gather_is_within_one_rounding() -> None:
    for size, dtype, encoding, asynchronous in cases():
        values = spread(size, dtype)
        everyone = of_all_ranks(values)
        outputs = [torch.empty_like(values) for _ in everyone]
        finish(comm.all_gather(outputs, values, async_op=asynchronous, encoding=encoding, min_bytes=0))
        for got, exact in zip(outputs, everyone, strict=True):
            assert_within(got, exact, sent_bound(exact, encoding))
            assert_same_on_all_ranks(got)


@check
def all_to_all_single_with_even_splits_is_within_one_rounding() -> None:
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


@check
def all_to_all_single_with_uneven_and_empty_splits_is_within_one_rounding() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype, encoding, asynchronous in cases():
        sends = [split_sizes(sender, ranks, size) for sender in range(ranks)]
        values = spread(2 * sum(sends[rank]), dtype).view(-1, 2)
        receives = [sends[sender][rank] for sender in range(ranks)]
        output = torch.empty(sum(receives), 2, dtype=dtype, device=DEVICE)
        everyone = of_all_ranks(values)
        finish(comm.all_to_all_single(output, values, receives, sends[rank], async_op=asynchronous, encoding=encoding))
        for sender, got in enumerate(output.split(receives)):
            counts = [2 * rows for rows in sends[sender]]
            sent = everyone[sender].view(-1)
            if not sent.numel():
                continue
            bound = rounding_bound(sent, block_amax(sent, counts, encoding.block_size), encoding)
            assert_within(got.reshape(-1), sent.split(counts)[rank], bound.split(counts)[rank])


@check
def all_to_all_of_nothing_at_all() -> None:
    ranks = dist.get_world_size()
    output = torch.empty(0, 4, device=DEVICE)
    comm.all_to_all_single(output, torch.empty(0, 4, device=DEVICE), [0] * ranks, [0] * ranks)
    assert output.shape == (0, 4)


@check
def all_to_all_is_within_one_rounding() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for size, dtype, encoding, asynchronous in cases():
        sends = [split_sizes(sender, ranks, size) for sender in range(ranks)]
        inputs = [spread(count, dtype) for count in sends[rank]]
        outputs = [torch.empty(sends[sender][rank], dtype=dtype, device=DEVICE) for sender in range(ranks)]
        everyone = of_all_ranks(torch.cat(inputs))
        finish(comm.all_to_all(outputs, inputs, async_op=asynchronous, encoding=encoding))
        for sender, got in enumerate(outputs):
            sent = everyone[sender].split(sends[sender])[rank]
            if sent.numel():
                assert_within(got, sent, sent_bound(sent, encoding))


@check
def broadcast_gives_all_ranks_the_same_bits() -> None:
    ranks = dist.get_world_size()
    for index, (size, dtype, encoding, asynchronous) in enumerate(cases()):
        values = spread(size, dtype)
        source = index % ranks
        exact = of_all_ranks(values)[source]
        where = {"src": source} if index % 2 else {"group_src": source}
        finish(comm.broadcast(values, async_op=asynchronous, encoding=encoding, min_bytes=0, **where))
        assert_within(values, exact, sent_bound(exact, encoding))
        assert_same_on_all_ranks(values)


@check
def point_to_point_around_the_ring() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    for size, dtype, encoding, blocking in cases():
        options = {"encoding": encoding, "min_bytes": 0}
        values, output = spread(size, dtype), torch.empty(size, dtype=dtype, device=DEVICE)
        exact = of_all_ranks(values)[source]
        if blocking and rank % 2 == 0:
            comm.send(values, to, **options)
            assert comm.recv(output, source, **options) == source
        elif blocking:
            waiting = comm.irecv(output, source, **options)
            comm.send(values, to, **options)
            waiting.wait()
        else:
            # two ranks that both send first would wait for each other over NCCL
            sending = comm.isend(values, to, **options) if rank % 2 else None
            comm.irecv(output, source, **options).wait()
            (sending or comm.isend(values, to, **options)).wait()
        assert_within(output, exact, sent_bound(exact, encoding))


@check
def batched_point_to_point_around_the_ring() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    to, source = (rank + 1) % ranks, (rank - 1) % ranks
    for size, dtype, encoding, _ in cases():
        options = {"encoding": encoding, "min_bytes": 0}
        values, output = spread(size, dtype), torch.empty(size, dtype=dtype, device=DEVICE)
        number, arrived = torch.tensor([rank], device=DEVICE), torch.tensor([-1], device=DEVICE)
        exact = of_all_ranks(values)[source]
        works = comm.batch_isend_irecv(
            [
                comm.P2POp(comm.isend, values, to, **options),
                comm.P2POp(comm.irecv, output, source, **options),
                comm.P2POp(comm.isend, number, to),
                comm.P2POp(comm.irecv, arrived, source),
            ]
        )
        for work in works:
            work.wait()
        assert_within(output, exact, sent_bound(exact, encoding))
        assert arrived.item() == source


@check
def infinity_and_nan_arrive_as_nan() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for bad, encoding in product((math.inf, -math.inf, math.nan), ENCODINGS):
        values = torch.ones(5000, device=DEVICE)
        if rank == ranks - 1:
            values[4321] = bad
        comm.all_reduce(values, encoding=encoding, min_bytes=0)
        assert values[4321].isnan()
        if encoding.block_size == 32:
            assert values[:4000].isfinite().all()
        output = torch.empty(ranks, 2, device=DEVICE)
        comm.all_gather_into_tensor(output, torch.tensor([bad, 1.0], device=DEVICE), encoding=encoding, min_bytes=0)
        assert output[:, 0].isnan().all()


@check
def zeros_stay_zeros_and_tiny_values_survive() -> None:
    values = torch.zeros(3000, device=DEVICE)
    values[2999] = 1e-30
    comm.all_reduce(values, min_bytes=0)
    assert not values[:2500].any()
    assert abs(values[2999].item() / (dist.get_world_size() * 1e-30) - 1) < 2**-3


@check
def several_in_flight_are_finished_in_any_order() -> None:
    ranks = dist.get_world_size()
    tensors = [spread(2000 + 100 * index) for index in range(6)]
    everyone = [of_all_ranks(values) for values in tensors]
    outputs = [torch.empty(ranks, 300, device=DEVICE) for _ in range(3)]
    inputs = [spread(300) for _ in outputs]
    gathered = [of_all_ranks(values) for values in inputs]
    works = [comm.all_reduce(values, async_op=True, min_bytes=0) for values in tensors]
    gathers = [
        comm.all_gather_into_tensor(output, values, async_op=True, min_bytes=0)
        for output, values in zip(outputs, inputs, strict=True)
    ]
    for work in reversed(works + gathers):
        work.wait()
        work.wait()  # a second time changes nothing
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()  # there `wait` makes the stream wait, not the host
        assert work.is_completed()
    for values, expected in zip(tensors, everyone, strict=True):
        assert_reduced(values, expected)
    for output, expected in zip(outputs, gathered, strict=True):
        for got, sent in zip(output, expected, strict=True):
            assert_within(got, sent, sent_bound(sent, Encoding()))


@check
def the_future_holds_the_outputs() -> None:
    values = spread(3000)
    expected = values.clone()
    comm.all_reduce(expected, min_bytes=0)
    future = comm.all_reduce(values, async_op=True, min_bytes=0).get_future()
    (output,) = future.wait()
    assert output is values
    assert torch.equal(values, expected)


@check
def polling_ends_with_the_outputs_written() -> None:
    values = spread(3000)
    expected = values.clone()
    comm.all_reduce(expected, min_bytes=0)
    work = comm.all_reduce(values, async_op=True, min_bytes=0)
    while not work.is_completed():
        pass
    assert torch.equal(values, expected)


@check
def a_handle_may_be_asked_and_waited_for_again() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values, output = spread(3000), torch.empty(3000, device=DEVICE)
    exact = of_all_ranks(values)[(rank - 1) % ranks]
    works = comm.batch_isend_irecv(
        [
            comm.P2POp(comm.isend, values, (rank + 1) % ranks, min_bytes=0),
            comm.P2POp(comm.irecv, output, (rank - 1) % ranks, min_bytes=0),
        ]
    )
    for work in works:
        assert work.wait()
    assert_within(output, exact, sent_bound(exact, Encoding()))
    output.zero_()  # what is decoded again would show
    for work in works:
        assert work.is_completed()
        assert work.wait()
    assert not output.any()


@check
def a_rank_outside_a_group_keeps_its_values() -> None:
    group = dist.new_group([0])
    values, part = torch.ones(3000, device=DEVICE), torch.ones(3000, device=DEVICE)
    if dist.get_rank() > 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that it is not a member
            comm.all_reduce(values, dist.ReduceOp.AVG, group)
            comm.reduce_scatter_tensor(part, values, dist.ReduceOp.AVG, group)
    assert values.tolist() == part.tolist() == [1.0] * 3000


@check
def broadcast_in_a_sub_group_takes_the_sources_global_rank() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if len(members) > 1 and rank in members:
        for source, where in ((members[-1], {"src": members[-1]}), (members[0], {"group_src": 0})):
            for min_bytes in (0, 2**30):
                values = torch.full((640,), float(rank), device=DEVICE)
                comm.broadcast(values, group=group, min_bytes=min_bytes, **where)
                assert values.tolist() == [float(source)] * 640
    dist.destroy_process_group(group)


@check
def the_second_cast_of_all_reduce_has_the_encodings_scales() -> None:
    for power_of_two in (True, False):
        values = spread(3000)
        comm.all_reduce(values, encoding=Encoding(power_of_two=power_of_two), min_bytes=0)
        # what FP8 gives times a power of two has no more bits than E4M3
        mantissas, _ = values.double().frexp()
        assert bool((mantissas * 16 == (mantissas * 16).round()).all()) == power_of_two


@check
def all_to_all_single_without_splits_divides_values_whatever_the_shape() -> None:
    ranks = dist.get_world_size()
    for shape in ((1, 2 * ranks, 8), (ranks + 1, ranks), (2 * ranks,), (3, ranks, 1)):
        count = math.prod(shape)
        values = (torch.arange(count, device=DEVICE) % 5 * 2.0 + dist.get_rank()).view(shape)
        for min_bytes in (0, 2**30):
            ours, torchs = torch.empty_like(values), torch.empty_like(values)
            comm.all_to_all_single(ours, values, min_bytes=min_bytes)
            dist.all_to_all_single(torchs, values)
            torch.testing.assert_close(ours, torchs, rtol=2**-4, atol=0.05)


@check
def reduce_scatter_takes_a_list() -> None:
    ranks = dist.get_world_size()
    for (size, dtype, encoding, asynchronous), op in product(cases(), (dist.ReduceOp.SUM, dist.ReduceOp.AVG)):
        parts = [spread(size, dtype).view(1, size) for _ in range(ranks)]
        if size % 2 == 0:  # lists may hold what does not lie in one piece
            parts = [part.view(2, -1).t().contiguous().t() for part in parts]
        ours, whole = torch.empty_like(parts[0].contiguous()), torch.empty(size, dtype=dtype, device=DEVICE)
        options = {"encoding": encoding, "min_bytes": 0}
        finish(comm.reduce_scatter(ours, parts, op, async_op=asynchronous, **options))
        comm.reduce_scatter_tensor(whole, torch.cat([part.reshape(-1) for part in parts]), op, **options)
        assert torch.equal(ours.view(-1), whole)


@check
def means_of_the_largest_values_are_finite() -> None:
    ranks = dist.get_world_size()
    for value, dtype in ((3.2e38, torch.float32), (3.2e38, torch.bfloat16), (6e4, torch.float16)):
        for min_bytes, encoding in ((0, Encoding()), (0, Encoding(power_of_two=True)), (2**30, Encoding())):
            options = {"encoding": encoding, "min_bytes": min_bytes}
            values = torch.full((ranks * 640,), value, dtype=dtype, device=DEVICE)
            part = torch.empty(640, dtype=dtype, device=DEVICE)
            comm.reduce_scatter_tensor(part, values, dist.ReduceOp.AVG, **options)
            coalesced = torch.empty_like(part)
            comm.reduce_scatter_coalesced(coalesced, [values], dist.ReduceOp.AVG, **options)
            comm.all_reduce(values, dist.ReduceOp.AVG, **options)
            for found in (part, coalesced, values):
                torch.testing.assert_close(found, torch.full_like(found, value), rtol=2**-4, atol=0)


def silent(operator: Operator) -> Callable[..., object]:
    """Kernels that write as those of a GPU do: they raise no version counter."""

    def write(*arguments: object) -> object:
        return operator.reference(*[each.data if isinstance(each, torch.Tensor) else each for each in arguments])

    return write


@contextmanager
def silent_kernels() -> Iterator[None]:
    """Where kernels run on the CPU too."""
    with (
        patch.object(Operator, "uses_triton", lambda self, tensor: True),
        patch.object(Operator, "triton", property(silent)),
    ):
        yield


def writers(min_bytes: int) -> dict[str, tuple[list[torch.Tensor], Callable[[bool], object]]]:
    """Each function that writes: what it writes to, and the call, which may be asynchronous."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own, whole = torch.ones(640, device=DEVICE), torch.ones(640 * ranks, device=DEVICE)
    leaf = torch.nn.Parameter(torch.ones(640, device=DEVICE))
    out, large = torch.empty_like(own), torch.empty_like(whole)
    parts = [torch.empty_like(own) for _ in range(ranks)]
    options = {"min_bytes": min_bytes}

    def ring(later: bool) -> SimpleNamespace | None:
        to, source = (rank + 1) % ranks, (rank - 1) % ranks
        sends = comm.P2POp(comm.isend, own, to, **options)
        works = comm.batch_isend_irecv([sends, comm.P2POp(comm.irecv, out, source, **options)])
        handle = SimpleNamespace(wait=lambda: [work.wait() for work in works])
        return handle if later else finish(handle)

    return {
        "all_reduce": ([leaf], lambda later: comm.all_reduce(leaf, async_op=later, **options)),
        "reduce_scatter_tensor": (
            [out],
            lambda later: comm.reduce_scatter_tensor(out, whole, async_op=later, **options),
        ),
        "reduce_scatter_coalesced": ([out], lambda _: comm.reduce_scatter_coalesced(out, [whole], **options)),
        "all_gather_into_tensor": (
            [large],
            lambda later: comm.all_gather_into_tensor(large, own, async_op=later, **options),
        ),
        "all_gather": (parts, lambda later: comm.all_gather(parts, own, async_op=later, **options)),
        "all_to_all_single": ([large], lambda later: comm.all_to_all_single(large, whole, async_op=later, **options)),
        "all_to_all": (
            parts,
            lambda later: comm.all_to_all(parts, list(whole.chunk(ranks)), async_op=later, **options),
        ),
        "broadcast": ([leaf], lambda later: comm.broadcast(leaf, 0, async_op=later, **options)),
        "point to point": ([out], ring),
    }


@check
def what_is_written_has_a_new_version() -> None:
    for min_bytes, later in product((0, 2**30), (False, True)):
        for name, (written, call) in writers(min_bytes).items():
            with silent_kernels() if DEVICE.type == "cpu" else nullcontext():
                before = [tensor._version for tensor in written]
                work = call(later)
                begun = [tensor._version for tensor in written]
                finish(work)
                after = [tensor._version for tensor in written]
            assert all(new > old for new, old in zip(after, before, strict=True)), (name, min_bytes, later)
            if work is not None:  # not before it is there: a cast made while it is on its way would be kept
                assert after > begun, (name, min_bytes, later)


@check
def sub_groups_reduce_among_themselves() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    values = spread(1000, torch.bfloat16)
    everyone = of_all_ranks(values)
    before = values.clone()
    if rank in members:
        comm.all_reduce(values, group=group, min_bytes=0)
        if len(members) > 1:
            assert_reduced(values, [everyone[member] for member in members])
            source = torch.full((64,), float(rank), device=DEVICE)
            comm.broadcast(source, group_src=1, group=group, min_bytes=0)
            assert source.tolist() == [2.0] * 64
            parts = [torch.empty_like(before) for _ in members]
            comm.all_gather(parts, before, group=group, min_bytes=0)
            for part, member in zip(parts, members, strict=True):
                assert_within(part, everyone[member], sent_bound(everyone[member], comm.Encoding()))
        else:
            assert torch.equal(values, before)
            assert comm.statistics()["all_reduce"].uncompressed == {"one rank": 1}
    dist.destroy_process_group(group)


def calls_in(group: dist.ProcessGroup) -> dict[str, Callable[..., list[torch.Tensor]]]:
    """Each function that torch.distributed has too, in a group; of the module and options it gives what arrived.

    What a rank has for another differs from all else by a half or more, which no rounding hides.
    """
    members = dist.get_process_group_ranks(group)
    ranks, rank = len(members), group.rank()
    after, before = members[(rank + 1) % ranks], members[rank - 1]
    rows = torch.tensor([2.0 ** (4 * rank + part) for part in range(ranks)], device=DEVICE)
    values = rows.repeat_interleave(300)
    own = values[:300] * 3
    sizes = [[100 * (1 + sender + 2 * receiver) for receiver in range(ranks)] for sender in range(ranks)]
    sent, received = sizes[rank], [of[rank] for of in sizes]
    uneven = rows.repeat_interleave(torch.tensor(sent, device=DEVICE))

    def all_reduce(module: Any, op: Any = dist.ReduceOp.SUM, **options: Any) -> list[torch.Tensor]:
        out = values.clone()
        module.all_reduce(out, op, group, **options)
        return [out]

    def reduce_scatter(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = torch.empty_like(own), torch.empty_like(own)
        module.reduce_scatter_tensor(outs[0], values, group=group, **options)
        module.reduce_scatter(outs[1], list(values.chunk(ranks)), group=group, **options)
        return list(outs)

    def gather(module: Any, **options: Any) -> list[torch.Tensor]:
        out, outs = torch.empty_like(values), [torch.empty_like(own) for _ in members]
        module.all_gather_into_tensor(out, own, group, **options)
        module.all_gather(outs, own, group, **options)
        return [out, *outs]

    def all_to_all(module: Any, **options: Any) -> list[torch.Tensor]:
        out, outs = torch.empty_like(values), [torch.empty_like(own) for _ in members]
        module.all_to_all_single(out, values, group=group, **options)
        module.all_to_all(outs, [part.clone() for part in values.chunk(ranks)], group, **options)
        return [out, *outs]

    def all_to_all_of_rows(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = []
        for shape in ((), (4,), (2, 3), (1, 2, 2)):
            out = torch.empty(sum(received), *shape, device=DEVICE)
            given = uneven.view(-1, *[1] * len(shape)).expand(-1, *shape).contiguous()
            module.all_to_all_single(out, given, received, sent, group, **options)
            outs.append(out)
        return outs

    def broadcast(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [own.clone(), own.clone()]
        module.broadcast(outs[0], members[-1], group, **options)
        module.broadcast(outs[1], group=group, group_src=ranks - 1, **options)
        return outs

    def one_by_one(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [torch.empty_like(own) for _ in range(4)]
        for pair, by_group in enumerate((False, True)):
            to = {"group_dst": (rank + 1) % ranks} if by_group else {"dst": after}
            source = {"group_src": (rank - 1) % ranks} if by_group else {"src": before}
            # the second of two messages is asked for first: their tags tell them apart
            works = [
                module.isend(own, group=group, tag=1, **to, **options),
                module.isend(own * 2, group=group, tag=2, **to, **options),
                module.irecv(outs[2 * pair + 1], group=group, tag=2, **source, **options),
                module.irecv(outs[2 * pair], group=group, tag=1, **source, **options),
            ]
            for work in works:
                work.wait()
        return outs

    def batched(module: Any, **options: Any) -> list[torch.Tensor]:
        outs = [torch.empty_like(own) for _ in range(3)]
        to, source = ({"peer": after}, {"peer": before})
        to_member, from_member = ({"group_peer": (rank + 1) % ranks}, {"group_peer": (rank - 1) % ranks})
        works = module.batch_isend_irecv(
            [
                module.P2POp(module.isend, own, group=group, tag=1, **to, **options),
                module.P2POp(module.isend, own * 2, group=group, tag=2, **to, **options),
                module.P2POp(module.irecv, outs[1], group=group, tag=2, **source, **options),
                module.P2POp(module.irecv, outs[0], group=group, tag=1, **source, **options),
                module.P2POp(module.isend, own * 4, group=group, tag=3, **to_member, **options),
                module.P2POp(module.irecv, outs[2], group=group, tag=3, **from_member, **options),
            ]
        )
        for work in works:
            work.wait()
        return outs

    return {
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "gather": gather,
        "all_to_all": all_to_all,
        "all_to_all of rows": all_to_all_of_rows,
        "broadcast": broadcast,
        **({} if DEVICE.type == "cuda" else {"one by one": one_by_one, "batched": batched}),  # NCCL knows no tags
    }


@check
def every_function_does_in_a_sub_group_what_torchs_does() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    members = list(range(1, ranks))
    group = dist.new_group(members)
    if len(members) > 1 and rank in members:
        for name, call in calls_in(group).items():
            expected = call(dist)
            for min_bytes in (0, 2**30):
                for one, other in zip(expected, call(comm, min_bytes=min_bytes), strict=True):
                    torch.testing.assert_close(other, one, rtol=2**-3, atol=0, msg=lambda text, name=name: name + text)
        values = torch.full((300 * len(members),), 2.0**rank, device=DEVICE)
        part, own = torch.empty(300, device=DEVICE), values[:5].clone()
        comm.reduce_scatter_coalesced(part, [values], group=group, min_bytes=0)
        comm.all_reduce_coalesced([own], group=group)
        for found in (part, own):
            torch.testing.assert_close(found, torch.full_like(found, sum(2.0**member for member in members)))
    dist.destroy_process_group(group)


@check
def what_is_not_compressed_is_plain_and_counted() -> None:
    ranks = dist.get_world_size()
    integers = torch.full((5000,), 3, device=DEVICE)
    comm.all_reduce(integers)
    assert integers.eq(3 * ranks).all()
    largest = torch.full((5000,), float(dist.get_rank()), device=DEVICE)
    comm.all_reduce(largest, dist.ReduceOp.MAX)
    assert largest.eq(ranks - 1).all()
    small = torch.full((4,), 0.1, device=DEVICE)
    for asynchronous in (False, True):
        mean = small.clone()
        finish(comm.all_reduce(mean, dist.ReduceOp.AVG, async_op=asynchronous, min_bytes=1000))
        torch.testing.assert_close(mean, small)
    comm.all_reduce(torch.ones(400, dtype=torch.bfloat16, device=DEVICE), min_bytes=801)
    row = comm.statistics()["all_reduce"]
    assert row.calls == 5
    assert row.uncompressed == {"int64": 1, "reduction MAX": 1, "small": 3}
    assert row.wire_bytes == row.raw_bytes
    for call in (
        lambda: comm.all_gather_into_tensor(torch.empty(ranks, device=DEVICE), torch.ones(1, device=DEVICE)),
        lambda: comm.broadcast(torch.ones(3, device=DEVICE), 0),
        lambda: comm.all_gather([torch.empty(1, device=DEVICE) for _ in range(ranks)], torch.ones(1, device=DEVICE)),
        lambda: comm.reduce_scatter_tensor(torch.empty(2, device=DEVICE), torch.ones(2 * ranks, device=DEVICE)),
        lambda: comm.all_to_all_single(torch.empty(ranks, device=DEVICE), torch.ones(ranks, device=DEVICE)),
    ):
        call()
    counted = comm.statistics()
    names = ("all_gather_into_tensor", "broadcast", "all_gather", "reduce_scatter_tensor", "all_to_all_single")
    for name in names:
        assert counted[name].uncompressed == {"small": 1}
        assert name in str(counted)


def large_calls(dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Each collective on large tensors, by the plain one's name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = spread(LARGE * ranks, dtype)
    part = values[:LARGE].clone()
    parts = list(values.clone().chunk(ranks))
    to, source = (rank + 1) % ranks, (rank - 1) % ranks

    def ring(module: object) -> None:
        sent = module.P2POp(module.isend, part, to)
        received = module.P2POp(module.irecv, part.clone(), source)
        for work in module.batch_isend_irecv([sent, received]):
            work.wait()

    return {
        "all_reduce": lambda m: m.all_reduce(values.clone()),
        "reduce_scatter_tensor": lambda m: m.reduce_scatter_tensor(part.clone(), values),
        "all_gather_into_tensor": lambda m: m.all_gather_into_tensor(values.clone(), part),
        "all_gather": lambda m: m.all_gather(parts, part),
        "all_to_all_single": lambda m: m.all_to_all_single(values.clone(), values),
        "all_to_all": lambda m: m.all_to_all([p.clone() for p in parts], parts),
        "broadcast": lambda m: m.broadcast(part.clone(), 0),
        "send": ring,
    }


@check
def wire_bytes_are_half_of_bf16_and_a_quarter_of_fp32() -> None:
    with patch.dict(MINIMUM_BYTES, dict.fromkeys(MINIMUM_BYTES, MINIMUM_BYTES[ON_THE_CPU])):
        check_wire_bytes()


def check_wire_bytes() -> None:
    for dtype, largest in ((torch.bfloat16, 0.52), (torch.float32, 0.26)):
        for name, call in large_calls(dtype).items():
            with count_traffic() as plain:
                call(dist)
            comm.reset_statistics()
            with count_traffic() as ours:
                call(comm)
            row = comm.statistics()[name]
            assert row.calls == 1, name
            assert row.wire_bytes <= largest * plain.sent, (name, dtype, row.wire_bytes / plain.sent)
            if not ours.counts:  # peers' memory is read directly
                assert mailbox_of(None, torch.empty(0, device=DEVICE), 1) is not None, name
                continue
            assert {key[1] for key in ours.counts} == {torch.uint8}, name
            assert abs(row.raw_bytes - plain.sent) < dist.get_world_size(), name  # each tensor's share is rounded
            assert row.wire_bytes == ours.sent, name


@check
def mistakes_raise_before_anything_is_sent() -> None:
    ranks = dist.get_world_size()
    values = torch.ones(ranks * 8, device=DEVICE)
    for call in (
        lambda: comm.all_reduce(torch.ones(8, 8, device=DEVICE).t(), min_bytes=0),
        lambda: comm.reduce_scatter_tensor(values.clone(), values, min_bytes=0),
        lambda: comm.reduce_scatter_coalesced(values.clone(), [values], min_bytes=0),
        lambda: comm.all_gather_into_tensor(values.clone(), values, min_bytes=0),
        lambda: comm.all_to_all_single(values.clone(), values, None, [1] * ranks),
        lambda: comm.all_to_all_single(values[:-ranks].clone(), values, min_bytes=0),
        lambda: comm.all_to_all([], []),
        lambda: comm.all_to_all([values], [values]),
        lambda: comm.all_gather([], values),
        lambda: comm.all_gather([values.clone() for _ in range(ranks)], values[1:].clone(), min_bytes=0),
        lambda: comm.reduce_scatter(values.clone(), []),
        lambda: comm.reduce_scatter(values.clone(), [values[1:]] * ranks),
        lambda: comm.reduce_scatter_coalesced(values.clone(), []),
        lambda: comm.batch_isend_irecv([]),
        lambda: comm.all_to_all_single(values.clone(), torch.ones(ranks * 8 + 1, device=DEVICE), min_bytes=0),
    ):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError("no ValueError")

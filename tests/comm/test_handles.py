"""Asynchronous calls, and of the version counters of what calls write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import Encoding
from fp8booster.kernels.operators import Operator
from tests.comm import harness
from tests.comm.bounds import assert_within
from tests.comm.harness import assert_reduced, finish, of_all_ranks, rank_test, sent_bound, spread


@rank_test
def test_several_in_flight_are_finished_in_any_order() -> None:
    ranks = dist.get_world_size()
    tensors = [spread(2000 + 100 * index) for index in range(6)]
    everyone = [of_all_ranks(values) for values in tensors]
    outputs = [torch.empty(ranks, 300, device=harness.DEVICE) for _ in range(3)]
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
        if harness.DEVICE.type == "cuda":
            torch.cuda.synchronize()  # there `wait` makes the stream wait, not the host
        assert work.is_completed()
    for values, expected in zip(tensors, everyone, strict=True):
        assert_reduced(values, expected)
    for output, expected in zip(outputs, gathered, strict=True):
        for got, sent in zip(output, expected, strict=True):
            assert_within(got, sent, sent_bound(sent, Encoding()))


@rank_test
def test_the_future_holds_the_outputs() -> None:
    values = spread(3000)
    expected = values.clone()
    comm.all_reduce(expected, min_bytes=0)
    future = comm.all_reduce(values, async_op=True, min_bytes=0).get_future()
    (output,) = future.wait()
    assert output is values
    assert torch.equal(values, expected)


@rank_test
def test_polling_ends_with_the_outputs_written() -> None:
    values = spread(3000)
    expected = values.clone()
    comm.all_reduce(expected, min_bytes=0)
    work = comm.all_reduce(values, async_op=True, min_bytes=0)
    while not work.is_completed():
        pass
    assert torch.equal(values, expected)


@rank_test
def test_a_handle_may_be_asked_and_waited_for_again() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values, output = spread(3000), torch.empty(3000, device=harness.DEVICE)
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
    own, whole = torch.ones(640, device=harness.DEVICE), torch.ones(640 * ranks, device=harness.DEVICE)
    leaf = torch.nn.Parameter(torch.ones(640, device=harness.DEVICE))
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


@rank_test
def test_what_is_written_has_a_new_version() -> None:
    for min_bytes, later in product((0, 2**30), (False, True)):
        for name, (written, call) in writers(min_bytes).items():
            with silent_kernels() if harness.DEVICE.type == "cpu" else nullcontext():
                before = [tensor._version for tensor in written]
                work = call(later)
                begun = [tensor._version for tensor in written]
                finish(work)
                after = [tensor._version for tensor in written]
            assert all(new > old for new, old in zip(after, before, strict=True)), (name, min_bytes, later)
            if work is not None:  # not before it is there: a cast made while it is on its way would be kept
                assert after > begun, (name, min_bytes, later)

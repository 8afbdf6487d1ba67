"""Count the functions that Python calls for a piece of work, also without a GPU."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fp8booster.comm import agreement
from fp8booster.kernels import product


class Moment(NamedTuple):
    """A call of a stand-in of this file."""

    name: str
    seconds: float
    calls: int
    """Python functions called before it, where they are counted."""

    launches: int
    """Kernels, products and operators of torch queued before it, where they are counted."""


moments: list[Moment] = []
"""Of a piece of work, in their order; whoever measures it clears them."""

_count, _launched = 0, 0


def _note(name: str) -> None:
    moments.append(Moment(name, time.perf_counter(), _count, _launched))


def _launch() -> None:
    global _launched
    _launched += 1


class _Operators(TorchDispatchMode):
    """Counts operators that a GPU would have work for: no views, no memory."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and "empty" not in function.__name__:
            _launch()
        return function(*args, **(kwargs or {}))


def launches(work: Callable[[], object]) -> int:
    """Count the kernels, products and operators of torch that a piece of work queues in `idle_gpu`."""
    global _launched
    _launched = 0
    with torch.autograd.set_multithreading_enabled(False), _Operators():
        work()
    return _launched


def python_calls(work: Callable[[], object]) -> int:
    """Count the Python functions that a piece of work calls, its backward included; a generator counts for each item.

    Args:
        work: what caches, compiles or collects garbage has done so; stand-ins of this file are not counted.
    """
    global _count
    _count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        global _count
        _count += event == "call" and frame.f_code.co_filename != __file__

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # what is collected may call something, at any time
    with torch.autograd.set_multithreading_enabled(False):  # backward runs on this thread then, for a GPU too
        sys.setprofile(see)
        try:
            work()
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()
    return _count


@contextmanager
def idle_gpu() -> Iterator[None]:
    """Tensors of the CPU take the way of a GPU's, up to each launch of a kernel or product, which does nothing.

    So the host does what it does for a GPU, and nobody waits for the work. What comes out has no values.

    Raises:
        ImportError: Triton is not installed.
    """
    import triton

    from fp8booster.kernels import launch
    from fp8booster.nn.fused import trials

    @contextmanager
    def computing() -> Iterator[None]:
        # what a trial computes decides what is fused
        with patch.object(torch.Tensor, "is_cuda", False), patch.object(torch.Tensor, "is_cpu", True), in_no_mode():
            yield

    in_no_mode = trials._disable_current_modes
    places = {
        (triton.JITFunction, "__getitem__"): lambda kernel, grid: lambda *arguments, **options: _Compiled(),
        (launch, "_variants"): {},
        (launch, "_CALLS_COMPILED"): True,
        (torch, "_scaled_mm"): _scaled_mm,
        (torch, "_scaled_grouped_mm"): _scaled_grouped_mm,
        (torch, "mm"): _mm,
        (torch.Tensor, "index_select"): _index_select,
        (trials, "_disable_current_modes"): computing,
        (product, "_decodable"): lambda a, b, inverse_scale_a, inverse_scale_b: (inverse_scale_a, inverse_scale_b),
        (torch.Tensor, "is_cuda"): True,
        (torch.Tensor, "is_cpu"): False,
        (torch.Tensor, "record_stream"): lambda tensor, stream: None,
        (torch.cuda, "is_current_stream_capturing"): lambda: False,
        (torch.cuda, "current_stream"): lambda device=None: None,
        (torch.cuda, "Event"): _Event,
        (torch._C, "_cuda_getCurrentRawStream"): lambda device: 0,
    }
    with ExitStack() as stack:
        stack.enter_context(product._without_onednn())  # slow where its instructions are emulated
        for (owner, name), value in places.items():
            stack.enter_context(patch.object(owner, name, value, create=True))
        yield


WAITED, EXCHANGED, MULTIPLIED = "the host waited", "rows were exchanged", "experts were multiplied"
"""Names of moments; what is exchanged is so with `idle_ranks` alone."""


@contextmanager
def idle_ranks(ranks: int, rows: int) -> Iterator[None]:
    """Make this process one of several ranks, to which the others send rows, and which agree to every call.

    Rows go to the first experts of two ranks, and come from these for the first one here, in numbers that differ from
    one call to the next, as they do in training. What else is sent is not, and what is received has no values.

    Args:
        ranks: two or more.
        rows: that this one sends at once.
    """
    # by the name that it has in this version of torch
    name = "all_to_all_single" if hasattr(dist.ProcessGroup, "all_to_all_single") else "alltoall_base"
    exchange = getattr(dist.ProcessGroup, name)
    calls = count(1)

    def exchanged(group: dist.ProcessGroup, output: Tensor, input: Tensor, *splits: Any) -> Any:
        _note(EXCHANGED)
        work = exchange(group, output, input, *splits)
        if input.dtype is torch.int64:  # numbers of rows, and what the ranks tell besides
            with _disable_current_modes():
                tell_rows(input, output, next(calls))
        return work

    def tell_rows(sent: Tensor, received: Tensor, call: int) -> None:
        first, arriving = 1 + call % (rows - 1), 1 + 7 * call % (rows - 1)
        sent.zero_(), received.zero_()
        sent[0, 0], sent[-1, 0] = first, rows - first
        received[0, 0], received[-1, 0] = first, arriving
        for numbers in (sent, received):
            numbers[:, -2] = numbers[:, 0]  # tokens, each with one expert there

    dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
    try:
        with (
            patch.object(dist.ProcessGroup, name, exchanged),
            patch.object(agreement.Claim, "begin", lambda claim, asynchronous: None),
        ):
            yield
    finally:
        dist.destroy_process_group()


def _index_select(tensor: Tensor, dim: int, index: Tensor) -> Tensor:
    """Stand for what a GPU selects by numbers that a kernel wrote."""
    return tensor.new_empty(*tensor.shape[:dim], len(index), *tensor.shape[dim + 1 :])


class _Event:
    """Stands for an event on a stream."""

    def record(self, stream: Any = None) -> None:
        """Mark nothing."""

    def wait(self, stream: Any = None) -> None:
        """Let no stream wait."""

    def synchronize(self) -> None:
        """Wait for nothing."""
        _note(WAITED)


class _Compiled:
    """Stands for what Triton compiled."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        """Launch nothing."""
        _launch()


def _scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None, **options: Any) -> Tensor:
    _launch()
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype) if out is None else out


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, *scales: Tensor, offs: Tensor, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    _launch()
    _note(MULTIPLIED)
    groups = (len(offs),) if b.dim() == 2 else ()  # of sums over the rows of each
    return torch.empty(*groups, a.shape[0], b.shape[-1], dtype=out_dtype)


def _mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    _launch()
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out

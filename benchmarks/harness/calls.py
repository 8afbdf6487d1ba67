"""Count the functions that Python calls for a piece of work, also without a GPU."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fp8booster.kernels import product


def python_calls(work: Callable[[], object]) -> int:
    """Count the Python functions that a piece of work calls, its backward included; a generator counts for each item.

    Args:
        work: what caches, compiles or collects garbage has done so; stand-ins of this file are not counted.
    """
    count = 0

    def see(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename != __file__

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
    return count


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


class _Event:
    """Stands for an event on a stream."""

    def record(self, stream: Any = None) -> None:
        """Mark nothing."""

    def wait(self, stream: Any = None) -> None:
        """Let no stream wait."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class _Compiled:
    """Stands for what Triton compiled."""

    function = packed_metadata = None

    def run(self, *arguments: Any) -> None:
        """Launch nothing."""


def _scaled_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor | None = None, **options: Any) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype) if out is None else out


def _scaled_grouped_mm(
    a: Tensor, b: Tensor, *scales: Tensor, offs: Tensor, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    groups = (len(offs),) if b.dim() == 2 else ()  # of sums over the rows of each
    return torch.empty(*groups, a.shape[0], b.shape[-1], dtype=out_dtype)


def _mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
    return torch.empty(a.shape[0], b.shape[1], dtype=out_dtype or a.dtype) if out is None else out

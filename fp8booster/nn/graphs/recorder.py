"""Captures work of one GPU into CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from fp8booster.comm.observer import observer

Made = TypeVar("Made")


class Recorder:
    """Gives each graph memory of its own, but for those whose results are used up at once: these have one memory.

    Graphs with one memory write their passing values where another that was captured later keeps its results.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._passing = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Callable[[], Made], *, passing: bool = False) -> tuple[Callable[[], None], Made]:
        """As `weights.pinned.Record`.

        Raises:
            RuntimeError: work that cannot be captured, as where the host reads a value from the GPU.
        """
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()  # what a collection frees in the midst may call what a capture forbids
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                # other threads, such as NCCL's watchdog, may ask for events meanwhile
                graph.capture_begin(pool=self._passing if passing else None, capture_error_mode="thread_local")
                try:
                    with observer.noted_at_replays() as note_calls:
                        made = work()
                except BaseException:
                    with suppress(RuntimeError):  # it was invalid by then
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay() -> None:
            graph.replay()
            note_calls()

        return replay, made


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what captures work of a device; None where it has no CUDA graphs."""
    return Recorder(device) if device.type == "cuda" else None

"""A stand-in for the recorder of CUDA graphs: layers are captured as on a GPU, and the memory is counted."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fp8booster.colossal.temporarily import temporarily
from fp8booster.monitor.memory import MemoryTracker, Pool
from fp8booster.nn.graphs import held, layer, pair, recorder, values
from fp8booster.nn.graphs.breaks import Cut
from fp8booster.nn.graphs.recorder import Memory, Place, Recorder

GRAPHS = "CUDA graphs"
"""Part of memory that graphs keep."""

Made = TypeVar("Made")


class CountedGraphs:
    """As `nn.graphs.recorder.Recorder`, for tensors without values: a capture does the work once, a replay nothing.

    A GPU has room for all graphs, and the host is slower than it.
    """

    __call__ = Recorder.__call__
    place_like = Recorder.place_like
    holders = staticmethod(Recorder.holders)

    def __init__(self, tracker: MemoryTracker) -> None:
        self.captured = 0
        self._tracker = tracker
        self._pools: weakref.WeakKeyDictionary[Memory, Pool] = weakref.WeakKeyDictionary()
        self._places: dict[Any, torch.Tensor] = {}
        self._capturing = False

    @contextmanager
    def captured_into(self) -> Iterator[None]:
        """Let layers be captured by this, whose weights are tensors without values."""
        with (
            temporarily(recorder, recorder_for=lambda _: self),
            temporarily(held, _is_plain=lambda parameter: True),
            temporarily(values, TENSORS=(torch.Tensor, torch.nn.Parameter, FakeTensor)),
            temporarily(layer, who_looks=lambda: None),  # what counts memory sees the capture
            # tensors without values all lie at 0
            temporarily(pair, _address=lambda tensor: tensor.untyped_storage()._cdata),
            temporarily(layer, random_state=lambda device: None),  # and random ones are drawn by no generator
        ):
            yield

    def in_pieces(
        self, work: Callable[[Cut], Made], memory: Memory | None = None, *, across_threads: bool = False
    ) -> tuple[list[Callable[[], None]], Made]:
        """As `Recorder.in_pieces`."""
        self.captured += 1
        pieces = [0]
        pool = Pool(self._tracker, GRAPHS)
        if memory is not None:
            pool = self._pools.setdefault(memory, pool)
        self._capturing = True
        try:
            with self._tracker.inside(pool):
                made = work(pieces.append)
        finally:
            self._capturing = False

        def replay(pool: Pool = pool) -> None:  # a graph keeps its pool, also what the capture has freed in it
            pass

        return [replay] * len(pieces), made

    def new_memory(self) -> Memory:
        """Return memory for graphs that share it."""
        return Memory(object)

    def in_use(self, memory: Memory) -> dict[int, int]:
        """Return the bytes of what somebody holds in a memory, by storage."""
        return self._pools[memory].held() if memory in self._pools else {}

    def allocated(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and of all that there have been."""
        return self._tracker.bytes, self._tracker.made

    def why_no_room(self, memory: Memory, kept: int, passing: int) -> None:
        """Return None: there is room."""

    def outside(self, shape: tuple[int, ...], dtype: torch.dtype, number: int | None = None) -> Place | None:
        """Return memory that belongs to no graph, in the midst of a capture; no plugin has layers that share it."""
        if not self._capturing:
            return None
        with self._tracker.inside(Pool(self._tracker, GRAPHS)):  # one of its own: it is as large as the tensor
            memory = torch.empty(shape, dtype=dtype, device="cpu")
        return Place(memory, self.holders(memory))

    def let_go(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor in memory that is counted already."""
        made = torch.empty_like(tensor)
        self._tracker.lies_elsewhere(made)
        return made

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        """Return memory of graphs, uint8."""
        made = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._tracker.lies_elsewhere(made)
        return made

    def follow_stream(self) -> None:
        """Do nothing: there are no streams."""

    def synchronize(self) -> None:
        """Do nothing: there is no device."""

    def timer(self) -> Callable[[], Callable[[], float]]:
        """Return a timer by which the device takes no time."""
        return lambda: lambda: 0.0

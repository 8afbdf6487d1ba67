"""Captures work of one GPU into CUDA graphs, and gives them memory."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs.breaks import Cut
from fp8booster.nn.weights.freshness import replay_uncounted
from fp8booster.nn.weights.stacking import holders

Made = TypeVar("Made")


class Memory:
    """Memory of graphs that are replayed last in, first out, as layers go forward and backward.

    Graphs that are captured later write their passing values where earlier ones write theirs, so what all layers need
    only while they run is there once. What a forward keeps for its backward was never in use by an earlier one, but
    lies where those have written: while it waits, no graph captured before it may be replayed.

    Args:
        new_handle: gives one of a new pool of the allocator.
    """

    def __init__(self, new_handle: Callable[[], Any]) -> None:
        self._new_handle = new_handle
        self.handle = new_handle()
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._was_used = False
        self._captured = 0
        self._waiting: list[Any] = []  # forwards whose backward is awaited, in the order of their capture
        self._kept: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()

    def handle_for(self, graph: Any) -> Any:
        """Return the handle of the pool for a graph that is about to be captured."""
        # torch gives up a pool with its last graph, and no longer captures into it
        if self._was_used and not self._graphs:
            self.handle = self._new_handle()
        self._was_used = True
        self._graphs.add(graph)
        return self.handle

    def add(self, owner: Any, kept: dict[int, int]) -> int:
        """Return the place in the order of capture of an owner's graphs.

        Args:
            owner: has `order`, `is_free`.
            kept: bytes of what must stay from one of its replays to the next, by address.
        """
        self._captured += 1
        self._kept[owner] = kept
        return self._captured

    def later_ones(self, owner: Any) -> list[Any]:
        """Return those captured after an owner that wait for their backward; none where all is last in, first out."""
        waiting = self._waiting
        # those that are done leave from the end: last in, first out, so the list stays short and this costs no search
        while waiting and waiting[-1].is_free:
            waiting.pop()
        if not waiting or waiting[-1].order <= owner.order:
            return []
        return [each for each in waiting if each.order > owner.order and not each.is_free]

    def wait_for(self, owner: Any) -> None:
        """Note that an owner's forward was replayed, before which `later_ones` were none."""
        self._waiting.append(owner)

    def is_whole(self, in_use: dict[int, int]) -> bool:
        """Tell whether all that graphs keep is in use still; else a later capture would take it.

        Args:
            in_use: as `Recorder.in_use`.
        """
        return all(in_use.keys() >= kept.keys() for kept in self._kept.values())


class Place(NamedTuple):
    """Memory that graphs write and that is none of theirs."""

    memory: Tensor

    free_holders: int
    """How many hold it while nobody holds a part of it."""


class _Bytes:
    """Memory at an address, which this does not keep: `torch.as_tensor` takes it."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


ROOM = 2**30
"""Bytes of a GPU that graphs leave free, for buffers of NCCL and what else is not of torch's allocator."""


class Recorder:
    """Captures work of a GPU.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._outside_stream = torch.cuda.Stream(device)
        self._outside: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self._replayed_on: int | None = None
        self._stream_of_replays: Any = None
        self._places: dict[Any, Tensor] = {}
        self._shared: dict[Any, Place] = {}
        self._peak = 0  # bytes of tensors at once, in steps before graphs
        self._eager = 0

    def new_memory(self) -> Memory:
        """Return memory that several graphs can have."""
        return Memory(torch.cuda.graph_pool_handle)

    def __call__(self, work: Callable[[], Made], memory: Memory | None = None) -> tuple[Callable[[], None], Made]:
        """As `weights.pinned.Record`.

        Raises:
            RuntimeError: work that cannot be captured, as where the host reads a value from the GPU.
        """
        (replay,), made = self.in_pieces(lambda cut: work(), memory)
        return replay, made

    def in_pieces(
        self, work: Callable[[Cut], Made], memory: Memory | None = None, *, across_threads: bool = False
    ) -> tuple[list[Callable[[], None]], Made]:
        """Capture work into as many graphs as it has pieces, and return what replays each.

        Args:
            work: calls what it is given where a piece ends, with the tensors of it that are read before the next.
            memory: of the graphs.
            across_threads: pieces may end in another thread than they began in, as in backward, which autograd runs.

        Raises:
            RuntimeError: as above.
        """
        graphs: list[torch.cuda.CUDAGraph] = []
        pools: list[Any] = []
        # other threads, such as NCCL's watchdog, may ask for events meanwhile
        mode = "relaxed" if across_threads else "thread_local"

        def begin() -> None:
            graph = torch.cuda.CUDAGraph()
            pools.append(torch.cuda.graph_pool_handle() if memory is None else memory.handle_for(graph))
            graph.capture_begin(pool=pools[-1], capture_error_mode=mode)
            graphs.append(graph)

        def cut(made: Sequence[Tensor | None]) -> None:
            _end(graphs[-1])
            begin()

        # a collection in the midst may free a graph or an event, which a capture forbids
        collects = gc.isenabled()
        gc.disable()
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                begin()
                try:
                    with observer.noted_at_replays() as note_calls:
                        made = work(cut)
                    _end(graphs[-1])
                except BaseException:
                    self._break_off(graphs[-1], pools[-1])
                    raise
        finally:
            if collects:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

        def replay(graph: torch.cuda.CUDAGraph) -> None:
            self.follow_stream()
            replay_uncounted(graph)
            if graph is graphs[-1]:
                note_calls()

        return [partial(replay, graph) for graph in graphs], made

    def _break_off(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture that failed, so that the process draws random numbers and frees memory as before."""
        with suppress(RuntimeError):  # it is invalid, or had ended
            _end(graph)
        # where `CUDAGraph.capture_end` raises, the allocator and the generator are still those of a capture
        with suppress(RuntimeError):  # it was not so
            torch.cuda.memory._cuda_endAllocateToPool(self._device.index, pool)
            torch.cuda.memory._cuda_releasePool(self._device.index, pool)
        with suppress(RuntimeError):  # what broke off says more
            nothing = torch.cuda.CUDAGraph()
            nothing.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
            _end(nothing)

    def timer(self) -> Callable[[], Callable[[], float | None]]:
        """Begin to time the GPU's work; return what ends that, and gives what tells the seconds: None until then."""
        stream = torch.cuda.current_stream(self._device)
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record(stream)

        def seconds() -> float | None:
            return began.elapsed_time(ended) / 1000 if ended.query() else None

        def end() -> Callable[[], float | None]:
            ended.record(stream)
            return seconds

        return end

    def synchronize(self) -> None:
        """Wait for all work of the device."""
        torch.cuda.synchronize(self._device)

    def follow_stream(self) -> None:
        """Let the current stream wait for the one of the last replay: both write to the same memory."""
        now = torch._C._cuda_getCurrentRawStream(self._device.index)  # without an object at each replay
        if now != self._replayed_on:
            current = torch.cuda.current_stream(self._device)
            if self._stream_of_replays is not None:
                current.wait_stream(self._stream_of_replays)
            self._replayed_on, self._stream_of_replays = now, current

    def in_use(self, memory: Memory) -> dict[int, int]:
        """Return the bytes of what somebody holds in a memory, by address."""
        return {
            block["address"]: block["size"]
            for segment in self._segments(memory)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def free_in(self, memory: Memory) -> int:
        """Return the bytes of a memory that nobody holds."""
        return sum(segment["total_size"] - segment["active_size"] for segment in self._segments(memory))

    def allocated(self) -> tuple[int, int]:
        """Return the bytes of tensors now, and of all that there have been; note what the steps so far needed."""
        found = torch.cuda.memory_stats(self._device)
        self._peak = max(self._peak, found["allocated_bytes.all.peak"])
        return found["allocated_bytes.all.current"], found["allocated_bytes.all.allocated"]

    def why_no_room(self, memory: Memory, kept: int, passing: int) -> str | None:
        """Return why there is no room for graphs beside what eager layers need; None: there is.

        What nobody holds is given back to the device before, for a capture cannot.

        Args:
            memory: of the graphs.
            kept: bytes that stay.
            passing: bytes that are free again after a replay; what is free in the memory serves.
        """
        self.allocated()  # who resets the peak at each step is seen here too
        reserved = torch.cuda.memory_reserved(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        of_graphs = sum(each.nbytes for each in self._outside) + sum(
            each["total_size"]
            for each in torch.cuda.memory_snapshot()
            if each["device"] == self._device.index and tuple(each["segment_pool_id"]) != (0, 0)
        )
        # before the cache is emptied; a part of it may be scraps, so no more than a tenth over what was in use at once
        self._eager = max(self._eager, min(reserved - of_graphs, int(1.1 * self._peak)))
        torch.cuda.empty_cache()
        left = free + reserved - self._eager - of_graphs - ROOM
        need = kept + max(0, passing - self.free_in(memory))
        if need <= left:
            return None
        return f"its graphs need {need / 2**30:.2f} GiB, and eager layers leave {max(left, 0) / 2**30:.2f}"

    def _segments(self, memory: Memory) -> list[dict[str, Any]]:
        return [
            segment
            for segment in torch.cuda.memory_snapshot()
            if segment["device"] == self._device.index and tuple(segment["segment_pool_id"]) == tuple(memory.handle)
        ]

    def let_go(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the same memory that does not hold it: valid until another graph is replayed."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return tensor
        # by `__cuda_array_interface__`: a tensor over an address that keeps nothing alive, without a private function
        held = self.bytes_at(storage.data_ptr(), storage.nbytes()).untyped_storage()
        made = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return made.set_(held, tensor.storage_offset(), tensor.shape, tensor.stride())

    def bytes_at(self, address: int, size: int) -> Tensor:
        """Return memory of graphs, uint8, which this does not hold."""
        return torch.as_tensor(_Bytes(address, size), dtype=torch.uint8, device=self._device)

    def outside(self, shape: tuple[int, ...], dtype: torch.dtype, number: int | None = None) -> Place | None:
        """Return memory that belongs to no graph, in the midst of a capture; None where nothing is captured.

        Args:
            shape, dtype: of what is written there.
            number: all graphs of this recorder share the place of this number, shape and type; None: it is new.
        """
        if not torch.cuda.is_current_stream_capturing():
            return None
        key = number, shape, dtype
        place = self._shared.get(key)
        if place is None:
            place = self._new_outside(shape, dtype)
            if number is not None:
                self._shared[key] = place
        return place

    def _new_outside(self, shape: tuple[int, ...], dtype: torch.dtype) -> Place:
        made: list[Tensor] = []

        def allocate() -> None:
            with torch.cuda.stream(self._outside_stream):  # the allocator goes by the stream
                made.append(torch.empty(shape, dtype=dtype, device=self._device))

        thread = threading.Thread(target=allocate)  # the one that captures may not ask the device for memory
        thread.start()
        thread.join()
        self._outside.update(made)
        return Place(made[0], self.holders(made[0]))

    holders = staticmethod(holders)

    def place_like(self, tensor: Tensor, number: int) -> Tensor:
        """Return a place that all graphs of this recorder share, for what is laid there and used up in one replay.

        Args:
            tensor: has its shape, type and strides.
            number: tells places of one replay apart.
        """
        key = number, tensor.shape, tensor.dtype, tensor.stride()
        if key not in self._places:
            self._places[key] = torch.zeros_like(tensor)
        return self._places[key]


def _end(graph: torch.cuda.CUDAGraph) -> None:
    with warnings.catch_warnings():
        # a piece may have nothing to compute, as backward from a sum to an eager call that is one of its terms
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        graph.capture_end()


def recorder_for(device: torch.device) -> Recorder | None:
    """Return what captures work of a device; None where it has no CUDA graphs."""
    return Recorder(device) if device.type == "cuda" else None

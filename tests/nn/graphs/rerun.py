"""What stands in for a CUDA graph on the CPU: the work is done again, and its results are laid where the first lay."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs.recorder import Memory, Place, Recorder
from fp8booster.nn.weights.pinned import Copies, copies_are_held


class _Made(TorchDispatchMode):
    """Notes where the memory lies that operators make, and does not hold it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {_address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and _address(each) not in given:
                self.addresses.add(_address(each))
        return made


class Graph:
    """As `torch.cuda.CUDAGraph`, whose pool torch gives up with the last."""


class Rerun:
    """As `nn.graphs.recorder.Recorder`; counts what it has captured, and how often that was replayed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.graphs: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()  # those that somebody could replay
        self._pools: dict[object, weakref.WeakSet[Graph]] = {}
        self._passing: weakref.WeakKeyDictionary[Memory, list[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._blocks: weakref.WeakKeyDictionary[Memory, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()
        self._shared: dict[tuple, Place] = {}
        self._made: set[int] = set()  # addresses of results that captures have made
        self._outside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._results: dict[int, weakref.ref[torch.Tensor]] = {}  # tensors that replays write, as no graph's do

    def new_memory(self) -> Memory:
        return Memory(object)

    def in_use(self, memory: Memory) -> dict[int, int]:
        return {address: len(block) for address, block in self._blocks.get(memory, {}).items()}

    def bytes_at(self, address: int, size: int) -> torch.Tensor:
        return next(blocks[address] for blocks in self._blocks.values() if address in blocks)

    def allocated(self) -> tuple[int, int]:
        return 0, 0

    def why_no_room(self, memory: Memory, kept: int, passing: int) -> str | None:
        return None

    def outside(self, shape: tuple[int, ...], dtype: torch.dtype, number: int | None = None) -> Place:
        key = number, shape, dtype
        place = self._shared.get(key)
        if place is None:
            memory = torch.full(shape, torch.nan, dtype=dtype)
            place = Place(memory, Recorder.holders(memory))
            self._outside[id(memory)] = weakref.ref(memory)
            if number is not None:
                self._shared[key] = place
        return place

    def place_like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        return torch.zeros_like(tensor)

    def follow_stream(self) -> None:
        pass

    def timer(self) -> Callable[[], Callable[[], float | None]]:
        return lambda: self.seconds

    @staticmethod
    def seconds() -> float | None:
        """What the device takes for a forward: less than the host."""
        return 0.0

    def synchronize(self) -> None:
        pass

    def holders(self, tensor: torch.Tensor) -> int:
        place = _address(tensor)
        own = [each for each in _alive(self._results) if each is not tensor and _address(each) == place]
        return Recorder.holders(tensor) - len(own)

    def let_go(self, tensor: torch.Tensor) -> torch.Tensor:
        if _address(tensor) in self._made:  # else it is what the work was given, which lies in no graph's memory
            self._now.append(tensor.detach())
        return tensor

    def __call__(self, work: Callable[[], Any], memory: Memory | None = None) -> tuple[Callable[[], None], Any]:
        (replay,), made = self.in_pieces(lambda cut: work(), memory)
        return replay, made

    def in_pieces(
        self, work: Callable[[Any], Any], memory: Memory | None = None, *, across_threads: bool = False
    ) -> tuple[list[Callable[[], None]], Any]:
        self.captured += 1
        graph = Graph()
        if memory is not None:
            handle = memory.handle_for(graph)
            if handle in self._pools and not self._pools[handle]:
                raise RuntimeError("this pool was given up with its last graph")
            self._pools.setdefault(handle, weakref.WeakSet()).add(graph)
        held = copies_are_held if Copies.held else nullcontext
        casts = torch.is_autocast_enabled("cpu")
        untouched = [(each, each.clone()) for each in _alive(self._outside)]
        pieces: list[Any] = []
        with observer.noted_at_replays() as note_calls, nothing_sent(), _Made() as made:
            pieces.append(work(pieces.append))
        self._made |= {_address(each) for places in pieces for each in _tensors(places)} & made.addresses
        _overwrite(pieces[-1])  # a capture computes nothing
        for place, values in untouched:
            place.copy_(values)
        self._results.update({id(each): weakref.ref(each) for each in pieces[-1] if each is not None})
        passing = [] if memory is None else self._passing.setdefault(memory, [])
        self._now = passing
        if memory is not None:  # what the work keeps lies in its closure: this stands for it
            block = torch.zeros(8, dtype=torch.uint8)
            self._blocks.setdefault(memory, {})[block.data_ptr()] = block

        def as_captured(cut: Any) -> Any:
            with torch.enable_grad(), torch.autocast("cpu", enabled=casts):
                return work(cut)

        running: list[Stepwise] = []

        def replay(number: int, graph: Graph = graph) -> None:
            self.replayed += number == 0
            if number == 0:
                while running:
                    running.pop().give_up()
                running.append(Stepwise(as_captured) if len(pieces) > 1 else _AtOnce(as_captured))
            with held(), observer.noted_at_replays():  # a graph runs no Python
                results = running[-1].step()
            if number == len(pieces) - 1:
                note_calls()
            values = [each.clone() for each in _tensors(results)]  # one may be what the work was given, as it lay there
            _overwrite(passing)  # of all graphs that have the memory
            for place, made in zip(_tensors(pieces[number]), values, strict=True):
                place.copy_(made)

        replays = [partial(replay, number) for number in range(len(pieces))]
        self.graphs.update(replays)
        return replays, pieces[-1]


class _AtOnce:
    """Work without a cut."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def step(self) -> Any:
        return self._work(None)

    def give_up(self) -> None:
        pass


class Stepwise:
    """Work that stops at each cut until the next step, in a thread: no other code can be left and resumed."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._may_go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._found: list[Any] = []
        self._error: BaseException | None = None
        self._is_given_up = False
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Any], Any]) -> None:
        try:
            self._may_go.acquire()
            if not self._is_given_up:
                self._found.append(work(self._cut))
        except BaseException as error:
            self._error = error
        self._stopped.release()

    def _cut(self, made: Any) -> None:
        self._found.append(made)
        self._stopped.release()
        self._may_go.acquire()
        if self._is_given_up:
            raise RuntimeError("given up")

    def step(self) -> Any:
        """Go on to the next cut, or to the end, and return what there is to read."""
        self._may_go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._found[-1]

    def give_up(self) -> None:
        """Let the thread end."""
        self._is_given_up = True
        self._may_go.release()
        self._thread.join()


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Let collectives do nothing in the block, as in a capture: no other rank needs to make one."""
    done = SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

    def idle(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        return done if async_op else None

    with ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, idle))
        yield


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


def _alive(tensors: dict[int, weakref.ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for each in tensors.values() if (tensor := each()) is not None]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _overwrite(places: list[torch.Tensor]) -> None:
    for place in _tensors(places):
        place.copy_(torch.full(place.shape, torch.nan))


def _tensors(made: Any) -> list[torch.Tensor]:
    return [each.detach() for each in made if each is not None and each.numel()]

"""The graphs of one layer: when a call is captured into CUDA graphs, when it is replayed, and why it is not."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Container, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs import recorder
from fp8booster.nn.graphs.breaks import COMPUTED_AGAIN, Result, breaking_at, in_a_capture, noted_breaks
from fp8booster.nn.graphs.call_state import (
    CHECKPOINTING,
    autocast_dtype,
    generator_state,
    host_random_state,
    is_checkpointed_alone,
    random_state,
    who_looks,
    who_saves,
)
from fp8booster.nn.graphs.held import Held
from fp8booster.nn.graphs.pair import Freed, GraphPair, Moved
from fp8booster.nn.graphs.recorder import Memory, Recorder
from fp8booster.nn.graphs.static_call import parameters_of
from fp8booster.nn.graphs.values import Refused, Unsupported, flatten, marks_of
from fp8booster.nn.weights.pinned import Use, collected, collected_uses
from fp8booster.scaling.steps import optimizer_steps

WARM_UP = 3
"""Calls of a kind before it is captured: kernels are compiled, and engines have filled what they give, by then."""

MOST_KINDS = 8
"""Kinds of calls, such as lengths of sequences, that a layer captures."""

MOST_PAIRS = 16
"""Forwards of a kind that may wait for their backward, as in a pipeline."""

STATE_BYTES = 12
"""Bytes of a parameter that an optimizer may make in its first step: FP32 master weights and two moments."""

MOST_ORDERS = 2
"""Times that a layer is captured anew because layers run in another order than before; then it has its own memory."""

MOST_MOVES = 3
"""Times that a layer is captured anew because its weights have moved."""

MOST_OF_HOST = 1.5
"""A layer's forward that takes the GPU more than so many times as long as the host is left alone: its step has no time
in which the GPU waits, and copies into and out of graphs would cost up to 4 %. One that sends to other ranks is
captured whatever it takes, for its kernels wait for the slowest host."""


class NoRoom(Refused):
    """Graphs would take memory that eager layers need; the message tells how much."""


@dataclass
class _Kind:
    """Calls of one kind."""

    calls: int = 0
    host_seconds: float = float("inf")
    gpu_seconds: list[Callable[[], float | None]] = field(default_factory=list)  # of each call, once they are known
    uses: list[Use] = field(default_factory=list)
    results: list[Result] | None = None  # of calls that run eagerly in it; None: none of its calls has ended
    pairs: list[GraphPair] = field(default_factory=list)
    moves: int = 0
    orders: int = 0  # times that others, captured later, waited for their backward
    copies_gradients: bool = False  # somebody holds gradients of one backward when the next comes
    kept: int = 0  # bytes that its forward leaves for backward, with its outputs
    passing: int = 0  # bytes that its forward takes in all
    draws: bool = False  # random numbers
    host_draws: int = 0  # calls that drew random numbers on the host
    sends: bool = False  # to other ranks, for which its kernels wait
    why_not: str | None = None


@dataclass(eq=False)
class Shared:
    """State that the captured layers of a model share."""

    only_where_host_limits: bool  # leave alone what the GPU takes longer for than the host
    failure: str | None = None  # why a capture broke off: no other is tried
    looks_inside: list[Callable[[], bool]] = field(default_factory=list)  # True: layers run eagerly, for who looks
    _records: dict[torch.device, Recorder | None] = field(default_factory=dict)
    _memories: dict[tuple[torch.device, int], Memory] = field(default_factory=dict)
    threads: dict[str, int] = field(default_factory=dict)  # the first that ran a layer, which alone replays
    unseen: int = 0  # bytes of optimizer states of the model, until a step has made them
    steps: int = field(default_factory=optimizer_steps)

    def record_on(self, device: torch.device) -> Recorder | None:
        """Return what captures work of a device."""
        if device not in self._records:
            self._records[device] = recorder.recorder_for(device)
        return self._records[device]

    def memory_of(self, record: Recorder, device: torch.device, waiting: int) -> Memory:
        """Return the memory for the graphs of a layer, as many forwards of which wait for their backward.

        Micro-batches of a pipeline go backward first in, first out, so each has a memory.
        """
        place = device, waiting
        # graphs of a memory that lost a block stay right in it, as long as no capture takes that block
        memory = self._memories.get(place)
        if memory is None or not memory.is_whole(record.in_use(memory)):
            memory = self._memories[place] = record.new_memory()
        return memory

    def __reduce__(self) -> tuple:
        return partial(Shared, self.only_where_host_limits, unseen=self.unseen), ()


class LayerGraphs:
    """The graphs of one layer. A copy or a pickle of it is empty.

    Args:
        shared: of all layers of a model.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._kinds: dict[Hashable, _Kind] = {}
        self._held: Held | None = None
        self._ran_without_gradients = False
        self._changes, self._changed = 0, ""  # times in a row that graphs of other settings were forgotten, and a name
        self._writes = 0  # forwards in a row that have put other tensors into attributes
        self.why_not: str | None = TOO_EARLY  # why the last call in training was not replayed; None: it was
        _ALL.add(self)

    def run(self, forward: Callable[..., Any], layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what a layer's forward gives: by a replay in training, once a call of the kind was captured."""
        if not layer.training or torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if in_a_capture():
            # it has other leaves in place of its parameters now, and to free its graphs would break the capture off
            self.why_not = "it goes into another CUDA graph"
            return forward(*args, **kwargs)
        replayed = False
        given: list[Tensor] = []
        try:  # a second forward of checkpointing breaks off
            kind = self._kind_of(layer, args, kwargs, given)
            if kind is not None and kind.calls < WARM_UP:
                self.why_not = TOO_EARLY
                if self._changes > MOST_MOVES:
                    self.why_not = f"{self._changed} changes between calls"
                breaking, generators = ((), ()) if self._held is None else (self._held.breaking, self._held.generators)
                record = self.shared.record_on(given[0].device)
                with breaking_at(breaking):
                    return _warm_up(kind, record, forward, args, kwargs, given, generators)
            pairs = 0 if kind is None else len(kind.pairs)
            pair = None if kind is None else self._pair(kind, forward, layer, args, kwargs, given)
            if kind is not None and pair is not None:
                self._changes = 0
                try:
                    made = pair.run(given)
                    if collected.uses is not None:  # a layer around this one is called for the first times
                        collected.uses += kind.uses
                    replayed = len(kind.pairs) == pairs  # a capture runs the layer's own forward too
                    return made
                except Moved:  # begin anew with the kind
                    kind.pairs.clear()
                    kind.calls, kind.moves = 0, kind.moves + 1
                    if kind.moves == MOST_MOVES:
                        kind.why_not = "its weights move"
                    self.why_not = kind.why_not or "its weights have moved"
            return forward(*args, **kwargs)
        finally:
            if not replayed:  # settings that the layer's own forward has changed are no reason to capture it anew
                self._look(layer, settings_count=False)

    def forget(self) -> None:
        """Forget the graphs, and what the layer held, so that it can be freed; backwards that are awaited have theirs.

        In training a look at the next call does so too; in evaluation nobody looks.
        """
        for pair in [each for kind in self._kinds.values() for each in kind.pairs if each.is_free]:
            pair.free()  # who keeps a loss keeps the pair
        self._kinds.clear()
        self._held = None

    def has_seen_any_of(self, modules: Container[nn.Module]) -> bool:
        """Tell whether the layer is or has one of some modules, as a call in training has found it."""
        return self._held is not None and self._held.has_any_of(modules)

    @property
    def breaks(self) -> set[str]:
        """Return the reasons why parts of the layer run eagerly, between graphs."""
        return set() if self._held is None else {part.why for part in self._held.eager if part.why is not None}

    def _why_never(self, held: Held) -> str | None:
        """Return why a layer that holds this cannot be captured now."""
        if who_saves() not in (None, CHECKPOINTING):
            return "what it saves for backward is stored elsewhere"
        if self._writes >= WARM_UP:
            return "its forward puts other tensors into attributes each time, which a replay would not"
        return who_looks() or held.why_not

    def _look(self, layer: nn.Module, settings_count: bool = True) -> Held:
        """Look at what the layer's modules hold, and forget the graphs of others.

        Args:
            layer: whose graphs these are.
            settings_count: graphs of other settings are forgotten too.
        """
        before = self._held
        if before is not None and before.is_as_found(layer):
            self._writes *= settings_count
            return before
        found = self._held = Held(layer, self.shared.record_on)
        if before is not None and not settings_count:
            wrote = list(map(id, found.tensors)) != list(map(id, before.tensors))
            self._writes = self._writes + 1 if wrote else 0
        # of both, objects are there, so equal ids are of the same
        changed = None if before is None or not settings_count else found.changed_since(before)
        if before is None or found.parts != before.parts or changed is not None:
            self._kinds.clear()
        if changed is not None:
            self._changes, self._changed = self._changes + 1, changed
        return found

    def _kind_of(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any], given: list[Tensor]) -> _Kind | None:
        """Return the kind of a call in training, if it has one, and append the call's tensors."""
        if not torch.is_grad_enabled():
            self._ran_without_gradients = True
            return None
        if torch._C._current_graph_task_id() != -1:  # checkpointing of a forward that was not replayed
            if self._ran_without_gradients:
                self.why_not = "checkpointing computes it again within backward; use use_reentrant=False"
            return None
        self._ran_without_gradients = False
        held = self._look(layer)
        looks_inside = [looks for looks in self.shared.looks_inside if looks()]
        self.why_not = "a recording samples this step" if looks_inside else self._why_never(held)
        if self.why_not is not None:
            return None
        try:
            key = flatten((args, kwargs), given), autocast_dtype(given), who_saves()
        except Unsupported as error:
            self.why_not = f"it is given a {error}{'; set config.use_cache to False' if 'Cache' in str(error) else ''}"
            return None
        kind = self._kinds.get(key)
        if not given:
            self.why_not = "it is given no tensor"
        elif not held.trains and True not in map(_REQUIRES_GRAD, given):
            self.why_not = "nothing in it or before it is trained"
        elif kind is None and len({each.device for each in given}) > 1:
            # what lies on the host goes into a kernel as the number that it was at the capture
            self.why_not = "it is given tensors of several devices"
        elif self.shared.threads.setdefault("first", get_ident()) != get_ident():
            self.why_not = "another thread runs the model too"
        elif key[-1] == CHECKPOINTING and not is_checkpointed_alone(layer):
            # its second forward must save as many tensors as the first, and a replay saves none
            self.why_not = "checkpointing is of more than the layer; checkpoint each layer by itself"
        elif kind is not None:
            return kind
        elif len(self._kinds) == MOST_KINDS:
            self.why_not = f"{MOST_KINDS} calls with other shapes were captured before"
        else:
            return self._kinds.setdefault(key, _Kind())
        return None

    def _pair(
        self,
        kind: _Kind,
        forward: Callable[..., Any],
        layer: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        given: list[Tensor],
    ) -> GraphPair | None:
        """Return the graphs for a call, captured now if need be; None: `why_not` tells why there are none."""
        for hook, module in () if self._held is None else self._held.waits:  # a replay calls none of them
            hook(module, ())
        kind.pairs = [pair for pair in kind.pairs if not pair.lacks_graphs]
        for pair in kind.pairs:
            if pair.is_free:
                if pair.may_run and not (pair.was_set_aside or pair.gradients_were_held):
                    return pair
                kind.pairs.remove(pair)
                kind.copies_gradients |= pair.gradients_were_held
                if pair.was_set_aside or not pair.may_run:
                    kind.orders += MOST_ORDERS if pair.was_set_aside else 1
                break
        recompute = who_saves() == CHECKPOINTING
        if kind.why_not is None:
            kind.why_not = self.shared.failure
        if recompute and kind.draws:
            kind.why_not = "it draws random numbers, which checkpointing must draw again"
        if recompute and kind.results:
            kind.why_not = COMPUTED_AGAIN
        # how long a GPU takes that waits for another rank's host says nothing of this one
        if not kind.pairs and kind.why_not is None and self.shared.only_where_host_limits and not kind.sends:
            seconds = [found for measured in kind.gpu_seconds if (found := measured()) is not None]
            if len(seconds) < len(kind.gpu_seconds):  # the GPU is so far behind that it has not come to all of them
                self.why_not = TOO_EARLY
                return None
            # the first calls compile kernels
            if min(seconds) > MOST_OF_HOST * kind.host_seconds:
                kind.why_not = "the GPU takes longer than the host"
        record = self.shared.record_on(given[0].device)
        if record is None:
            kind.why_not = "CUDA graphs take a GPU"
        if kind.why_not is None and record is not None and len(kind.pairs) == MOST_PAIRS:
            self.why_not = f"{MOST_PAIRS} forwards wait for their backward"
            return None
        if kind.why_not is None and record is not None:
            try:
                pair = self._captured(kind, record, forward, layer, args, kwargs, given, recompute)
                kind.pairs.append(pair)
                return pair
            except Moved:
                kind.why_not = "its FP8 weights have no memory of their own"
            except Refused as error:
                kind.why_not = str(error)
            except Exception as error:  # whatever it is, the layer runs without
                self.shared.failure = kind.why_not = f"it cannot be captured ({str(error).partition(chr(10))[0]})"
        self.why_not = kind.why_not
        return None

    def _captured(
        self,
        kind: _Kind,
        record: Recorder,
        forward: Callable[..., Any],
        layer: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        given: list[Tensor],
        recompute: bool,
    ) -> GraphPair:
        device, waiting = given[0].device, sum(not pair.is_free for pair in kind.pairs)
        held = self._held or Held(layer, self.shared.record_on)
        modules = held.modules
        # of sharded layers each rank would keep all gradients, and FSDP2 uses those of one up before the next
        shares = any(use.source.is_transient for use in kind.uses)
        copies = kind.copies_gradients or recompute  # of checkpointed layers there is no room to spare
        for _ in range(2):
            apart = kind.orders >= MOST_ORDERS
            memory = record.new_memory() if apart else self.shared.memory_of(record, device, waiting)
            unseen = self.shared.unseen if self.shared.steps == optimizer_steps() else 0
            kept, passing = unseen + kind.kept + sum(each.nbytes for each in given), 3 * kind.passing
            places = 0 if shares else sum(each.nbytes for each in parameters_of(modules) if each.requires_grad)
            # places for gradients cost memory and save time, so they are the first to go
            copies = copies or record.why_no_room(memory, kept + places, passing) is not None
            why_not = record.why_no_room(memory, kept, passing) if copies else None
            if why_not is not None:
                raise NoRoom(why_not)
            with suppress(Freed), _CAPTURING:  # another memory is given then
                return GraphPair(
                    record,
                    memory,
                    forward,
                    args,
                    kwargs,
                    modules,
                    kind.uses,
                    held.tensors,
                    recompute=recompute,
                    results=kind.results or (),
                    breaking=held.breaking,
                    gradients="copied" if copies else "shared" if shares else "own",
                    sends=kind.sends,
                )
        raise RuntimeError("memory that other graphs keep is freed meanwhile")

    def __reduce__(self) -> tuple:
        return LayerGraphs, (self.shared,)


def forget_graphs(model: nn.Module) -> None:
    """Forget the graphs of all layers in a model, and of those that it is in, as it becomes another: see `forget`."""
    modules = set(model.modules())
    for graphs in [each for each in _ALL if each.has_seen_any_of(modules)]:
        graphs.forget()


_ALL: weakref.WeakSet[LayerGraphs] = weakref.WeakSet()

_REQUIRES_GRAD = attrgetter("requires_grad")

_CAPTURING = Lock()
"""Held while this process captures: flags of a capture are seen by all threads, as backward runs in others."""


TOO_EARLY = f"yet: from call {WARM_UP + 1} of a kind on"


def _warm_up(
    kind: _Kind,
    record: Recorder | None,
    forward: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    given: list[Tensor],
    generators: Sequence[Any],
) -> Any:
    kind.calls += 1
    device = given[0].device
    allocated = _nothing if record is None else record.allocated
    before = allocated()
    with collected_uses() as uses, noted_breaks(allocated, device) as noted:
        end = None if record is None else record.timer()
        drawn, sent = random_state(device), observer.sent_bytes
        drawn_on_host, drawn_by_own = host_random_state(device), list(map(generator_state, generators))
        marks, began = marks_of((args, kwargs)), time.perf_counter()
        made = forward(*args, **kwargs)
        kind.host_seconds = min(kind.host_seconds, time.perf_counter() - began)
        if end is not None:
            kind.gpu_seconds.append(end())
        kind.draws |= random_state(device) != drawn
        kind.host_draws += host_random_state(device) != drawn_on_host
        kind.sends |= observer.sent_bytes > sent
        values_were_read = collected.values_were_read
        own_draws = list(map(generator_state, generators)) != drawn_by_own
    # of the generators that all share another thread may have drawn in fewer calls
    if own_draws or kind.host_draws == WARM_UP:
        kind.why_not = "it draws random numbers on the host, which a replay would not"
    if marks_of((args, kwargs)) != marks:  # also a list that it fills
        kind.why_not = "it changes what it is given, of which a replay has a copy"
    if kind.results is not None and [each.kind for each in noted.results] != [each.kind for each in kind.results]:
        kind.why_not = "what must run eagerly in it gives other sizes, types or constants from call to call"
    if noted.why_not is not None:
        kind.why_not = noted.why_not
    if values_were_read:
        kind.why_not = "it reads values of weights that are gathered in FP8 alone"
    kind.kept, kind.passing = (now - then for now, then in zip(allocated(), before, strict=True))
    kind.kept, kind.passing = kind.kept - noted.kept, kind.passing - noted.passing
    kind.results = noted.results
    kind.uses = list({(id(use.source), use.transpose): use for use in uses}.values())
    return made


def _nothing() -> tuple[int, int]:
    return 0, 0

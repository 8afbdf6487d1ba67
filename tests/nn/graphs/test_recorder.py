"""Graphs of one GPU: what is called around a capture, on the CPU by stand-ins, and what a replay computes, on a GPU."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs.recorder import Memory, Place, Recorder, recorder_for

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of torch.cuda, in its order."""
    log: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str) -> None:
            log.extend([("begin", pool), capture_error_mode])

        def capture_end(self) -> None:
            log.append("end")
            if log[-2] == "broken":
                raise RuntimeError("the capture is invalid")

        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    pools = iter(("first pool", "second pool"))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch.cuda.memory, name, lambda index, pool, name=name: log.append((name, pool)))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "current"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return log


BEFORE = ["synchronize cuda:0", "side waits for current", "on side"]
AFTER = ["off side", "current waits for side"]


@pytest.mark.parametrize("shared", [False, True])
def test_work_is_captured_on_a_stream_that_waits_and_is_waited_for(calls: list[Any], shared: bool) -> None:
    recorder = Recorder(GPU)
    memory = recorder.new_memory() if shared else None
    collects = []

    def work() -> str:
        collects.append(gc.isenabled())
        calls.append("work")
        observer.note(lambda: calls.append("noted"))
        return "made"

    replay, made = recorder(work, memory)
    assert made == "made"
    begin = [("begin", "first pool"), "thread_local"]
    assert calls == [*BEFORE, *begin, "work", "end", *AFTER]
    assert collects == [False]  # what is collected may call what a capture forbids
    assert gc.isenabled()
    calls.clear()
    replay()
    replay()
    assert calls == ["replay", "noted"] * 2


def test_pieces_are_captured_one_after_the_other_and_may_be_empty(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = torch.cuda.CUDAGraph.capture_end

    def end_empty(graph: Any) -> None:
        end(graph)
        warnings.warn("The CUDA Graph is empty. This usually means that", stacklevel=1)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end_empty)
    recorder = Recorder(GPU)

    def work(cut: Callable[[list[torch.Tensor]], None]) -> str:
        observer.note(lambda: calls.append("noted"))
        cut([])
        calls.append("behind")
        return "made"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (first, last), made = recorder.in_pieces(work, recorder.new_memory(), across_threads=True)
    assert made == "made"
    begin = [("begin", "first pool"), "relaxed"]
    assert calls == [*BEFORE, *begin, "end", *begin, "behind", "end", *AFTER]
    calls.clear()
    first()
    last()
    assert calls == ["replay", "replay", "noted"]


def test_replays_on_two_streams_wait_for_each_other(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    current = [1]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    replay, _ = Recorder(GPU)(lambda: None)
    calls.clear()
    for stream in (1, 1, 2, 2, 1):
        current[0] = stream
        replay()
    waits = "current waits for current"
    assert calls == ["replay", "replay", waits, "replay", "replay", waits, "replay"]


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("broken", [True, False])
def test_a_capture_that_breaks_off_is_ended_and_says_why(calls: list[Any], broken: bool, collects: bool) -> None:
    def work() -> None:
        if broken:
            calls.append("broken")  # ending it fails too
        raise ValueError("the host reads a value")

    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(ValueError, match="the host reads a value"):
            Recorder(GPU)(work)
        assert gc.isenabled() is collects
    finally:
        gc.enable()
    first, second = ([("begin", f"{number} pool"), "thread_local"] for number in ("first", "second"))
    last = ["broken", "end"] if broken else ["end"]
    given_up = [(f"_cuda_{name}", "first pool") for name in ("endAllocateToPool", "releasePool")]
    assert calls == [*BEFORE, *first, *last, *given_up, *second, "end"]
    assert observer.note(lambda: None)  # the next call is noted at once again


def test_a_gpu_alone_has_graphs(calls: list[Any]) -> None:
    assert recorder_for(torch.device("cpu")) is None
    assert isinstance(recorder_for(GPU), Recorder)


class Owner:
    """A pair, as a memory knows it."""

    def __init__(self, memory: Memory, kept: dict[int, int] | None = None) -> None:
        self.is_free = True
        self.order = memory.add(self, kept or {})


def test_a_memory_knows_who_waits_that_was_captured_later() -> None:
    memory = Memory(object)
    first, second, third = (Owner(memory) for _ in range(3))

    def forward(owner: Owner) -> None:
        owner.is_free = False
        memory.wait_for(owner)

    forward(first)
    assert not memory.later_ones(second)
    forward(second)
    assert memory.later_ones(first) == [second]
    forward(third)
    assert memory.later_ones(first) == [second, third]
    assert memory.later_ones(second) == [third]
    assert not memory.later_ones(third)
    second.is_free = True  # its backward ran, or can no longer run
    assert memory.later_ones(first) == [third]
    third.is_free = True
    assert not memory.later_ones(first)
    assert memory._waiting == [first]


def test_a_memory_of_which_something_was_freed_is_not_whole() -> None:
    memory = Memory(object)
    one, other = Owner(memory, {16: 8, 32: 8}), Owner(memory, {64: 8})
    assert memory.is_whole({16: 8, 32: 8, 64: 8, 96: 8})
    assert not memory.is_whole({16: 8, 64: 8})
    del one
    assert memory.is_whole({64: 8})
    assert other.order == 2


def test_a_memory_whose_last_graph_is_gone_takes_another_pool() -> None:
    memory, first, second = Memory(object), Memory(object), Memory(object)
    handle = memory.handle_for(first)
    assert memory.handle_for(second) is handle
    del first
    third = Memory(object)
    assert memory.handle_for(third) is handle
    del second, third
    assert memory.handle_for(Memory(object)) is not handle


@pytest.mark.gpu
def test_a_memory_serves_again_when_its_last_graph_is_gone() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    x, memory = torch.ones(4096, device="cuda"), recorder.new_memory()
    for factor in (2.0, 3.0):
        replay, made = recorder(lambda factor=factor: [x * factor], memory)
        replay()
        assert made[0].unique().tolist() == [factor]
        del replay, made


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True])
def test_a_replay_does_the_work_again_on_what_lies_there_now(shared: bool) -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    inputs = [torch.full((4096,), float(number), device="cuda") for number in range(3)]

    def work_on(x: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        return lambda: [(x * 2 + 1).cumsum(0), x.sqrt()]

    memory = recorder.new_memory() if shared else None
    graphs = []
    for x in inputs:
        replay, made = recorder(work_on(x), memory)
        graphs.append((replay, [recorder.let_go(each) for each in made] if shared else made))
        del made
    if shared:
        assert not recorder.in_use(memory)
        assert len({made[0].data_ptr() for _, made in graphs}) == 1  # all write to one place
    for step in range(3):
        for number, x in enumerate(inputs):
            x.fill_(float(4 ** (number + step)))
        kept = []
        for replay, made in graphs:
            replay()
            kept.append([each.clone() for each in made] if shared else made)  # else it stays
        for found, x in zip(kept, inputs, strict=True):
            for one, other in zip(found, work_on(x)(), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_what_is_let_go_has_the_values_the_shape_and_the_strides() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    whole = torch.arange(48, device="cuda", dtype=torch.bfloat16).view(6, 8)
    for tensor in (whole, whole.t(), whole[2:, ::2], whole[:0], whole.view(torch.int16), whole[3, 3]):
        found = recorder.let_go(tensor)
        assert torch.equal(found, tensor)
        assert (found.stride(), found.dtype, found.storage_offset()) == (
            tensor.stride(),
            tensor.dtype,
            tensor.storage_offset(),
        )


@pytest.mark.gpu
def test_graphs_that_would_take_what_eager_layers_need_are_refused() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    memory = recorder.new_memory()
    recorder.allocated()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    assert recorder.why_no_room(memory, 2**20, 2**20) is None
    pattern = r"its graphs need [\d.]+ GiB, and eager layers leave [\d.]+"
    assert re.fullmatch(pattern, recorder.why_no_room(memory, total, 0))
    assert recorder.why_no_room(memory, 0, total) is not None


@pytest.mark.gpu
def test_memory_outside_of_a_capture_belongs_to_no_graph() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    memory = recorder.new_memory()
    assert recorder.outside((4, 4), torch.float32) is None
    x = torch.ones(64, 64, device="cuda")
    places: list[Place] = []

    def work() -> list[torch.Tensor]:
        places.append(recorder.outside((64, 64), torch.float32))
        places.extend(recorder.outside((64, 64), torch.float32, number) for number in (0, 0, 1))
        return [torch.add(x, 1, out=places[0].memory)]

    replay, _ = recorder(work, memory)
    assert not recorder.in_use(memory)
    replay()
    (place, free), *shared = places
    assert place.eq(2).all()
    assert recorder.holders(place) == free
    view = place[:2].detach()
    assert recorder.holders(place) == free + 1
    del view
    assert recorder.holders(place) == free
    assert shared[0] is shared[1]
    assert len({each.memory.data_ptr() for each in places}) == 3


@pytest.mark.gpu
def test_a_capture_on_a_gpu_that_breaks_off_leaves_it_usable() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(16, device="cuda")
    with pytest.raises(RuntimeError):
        recorder(lambda: x.sum().item())
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    torch.randn(16, device="cuda")
    # what another stream has used is free when that is done: in a capture it would stay
    side = torch.cuda.Stream()
    before = torch.cuda.memory_stats()["active_bytes.all.current"]
    used = torch.empty(2**24, device="cuda")
    used.record_stream(side)
    del used
    torch.cuda.synchronize()
    torch.empty(2**24, device="cuda")
    assert torch.cuda.memory_stats()["active_bytes.all.current"] == before
    replay, (made,) = recorder(lambda: [x + 1])
    replay()
    assert made.eq(2).all()

"""Graphs of one GPU: what is called around a capture, on the CPU by stand-ins, and what a replay computes, on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs.recorder import Recorder, recorder_for

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
            if "broken" in log:
                raise RuntimeError("the capture is invalid")

        def replay(self) -> None:
            log.append("replay")

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield
        log.append(f"off {stream.name}")

    pools = iter(("first pool", "second pool"))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, "current"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"synchronize {device}"))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    return log


BEFORE = ["synchronize cuda:0", "side waits for current", "on side"]
AFTER = ["off side", "current waits for side"]


@pytest.mark.parametrize("passing", [False, True])
def test_work_is_captured_on_a_stream_that_waits_and_is_waited_for(calls: list[Any], passing: bool) -> None:
    recorder = Recorder(GPU)
    collects = []

    def work() -> str:
        collects.append(gc.isenabled())
        calls.append("work")
        observer.note(lambda: calls.append("noted"))
        return "made"

    replay, made = recorder(work, passing=passing)
    assert made == "made"
    # what passes has one memory, all else memory of its own
    begin = [("begin", "first pool" if passing else None), "thread_local"]
    assert calls == [*BEFORE, *begin, "work", "end", *AFTER]
    assert collects == [False]  # what is collected may call what a capture forbids
    assert gc.isenabled()
    calls.clear()
    replay()
    replay()
    assert calls == ["replay", "noted"] * 2


def test_passing_work_has_one_memory_a_recorder(calls: list[Any]) -> None:
    pools = []
    for recorder in (Recorder(GPU), Recorder(GPU)):
        for _ in range(2):
            calls.clear()
            recorder(lambda: None, passing=True)
            pools.append(calls[len(BEFORE)][1])
    assert pools == ["first pool", "first pool", "second pool", "second pool"]


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
    assert "end" in calls
    assert observer.note(lambda: None)  # the next call is noted at once again


def test_a_gpu_alone_has_graphs(calls: list[Any]) -> None:
    assert recorder_for(torch.device("cpu")) is None
    assert isinstance(recorder_for(GPU), Recorder)


@pytest.mark.gpu
@pytest.mark.parametrize("passing", [False, True])
def test_a_replay_does_the_work_again_on_what_lies_there_now(passing: bool) -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    inputs = [torch.full((4096,), float(number), device="cuda") for number in range(3)]

    def work_on(x: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        return lambda: [(x * 2 + 1).cumsum(0), x.sqrt()]

    graphs = [recorder(work_on(x), passing=passing) for x in inputs]
    for step in range(3):
        for number, x in enumerate(inputs):
            x.fill_(float(4 ** (number + step)))
        kept = []
        for replay, made in graphs:
            replay()
            kept.append([each.clone() for each in made] if passing else made)  # else it stays
        for found, x in zip(kept, inputs, strict=True):
            for one, other in zip(found, work_on(x)(), strict=True):
                torch.testing.assert_close(one, other)


@pytest.mark.gpu
def test_a_capture_on_a_gpu_that_breaks_off_leaves_it_usable() -> None:
    recorder = recorder_for(torch.device("cuda", torch.cuda.current_device()))
    x = torch.ones(16, device="cuda")
    with pytest.raises(RuntimeError):
        recorder(lambda: x.sum().item())
    assert gc.isenabled()
    assert not torch.cuda.is_current_stream_capturing()
    replay, (made,) = recorder(lambda: [x + 1])
    replay()
    assert made.eq(2).all()

from __future__ import annotations

import threading

import pytest
import torch

from fp8booster import FP8Linear, fp8_linear
from fp8booster.nn.weights import freshness


class Graph:
    """A CUDA graph that was captured around a step."""

    def __init__(self, layer: FP8Linear) -> None:
        self.layer = layer

    def replay(self) -> None:
        self.layer.weight.data.add_(1)  # as kernels do: no hook runs, no version is raised


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type:
    """A class of CUDA graphs, on any machine."""
    graph = type("Graph", (Graph,), {"replay": Graph.replay})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    return graph


def step(layer: FP8Linear) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    torch.optim.SGD(layer.parameters(), lr=1.0).step()


def test_each_replay_of_a_step_that_was_captured_makes_weights_stale(graphs, monkeypatch) -> None:
    layer, x = FP8Linear(48, 32, bias=False), torch.randn(16, 48)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(2):
        step(layer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        layer(x)
        graphs(layer).replay()
        assert torch.equal(layer(x), fp8_linear(x, layer.weight))


def test_replays_do_not_count_where_no_step_was_captured(graphs) -> None:
    layer, x = FP8Linear(48, 32, bias=False), torch.randn(16, 48)
    step(layer)
    layer(x)
    before = freshness.weight_state(layer.weight)
    graphs(FP8Linear(48, 32)).replay()
    assert freshness.weight_state(layer.weight) == before


def test_another_thread_may_cast_weights_while_a_step_frees_copies(monkeypatch) -> None:
    here, there, x = FP8Linear(48, 32), FP8Linear(48, 32), torch.randn(16, 48)
    forget = freshness.FreshCopy.forget

    def forget_while_another_thread_casts(copy: freshness.FreshCopy) -> None:
        monkeypatch.setattr(freshness.FreshCopy, "forget", forget)
        thread = threading.Thread(target=there, args=[x])
        thread.start()
        thread.join()
        copy.forget()

    here(x)
    monkeypatch.setattr(freshness.FreshCopy, "forget", forget_while_another_thread_casts)
    step(here)
    assert here.fp8_weight.held is None
    assert there.fp8_weight.held is not None
    step(here)
    assert there.fp8_weight.held is None


@pytest.mark.gpu
def test_a_captured_step_is_seen_when_it_is_replayed() -> None:
    layer = FP8Linear(128, 128, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, capturable=True)
    layer.weight.grad = torch.ones_like(layer.weight)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        before = layer(x)
        graph.replay()
        after = layer(x)
        assert torch.equal(after, fp8_linear(x, layer.weight))
        assert not torch.equal(after, before)

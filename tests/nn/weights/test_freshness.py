from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, fp8_linear
from fp8booster.nn.weights import freshness
from fp8booster.nn.weights.pinned import copies_are_held
from fp8booster.scaling.steps import optimizer_steps


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


class ByHand:
    """Steps without torch's optimizers: writes through `.data`, keeps states by the ids of parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters, self.moments = list(parameters), dict[int, torch.Tensor]()

    def step(self) -> None:
        for parameter in self.parameters:
            moment = self.moments.setdefault(id(parameter), torch.zeros_like(parameter.data))
            parameter.data.add_(moment.mul_(0.9).add_(parameter.grad.data), alpha=-0.1)
            parameter.grad.zero_()


def write_in_backward(parameters: Iterable[nn.Parameter]) -> None:
    """As LOMO does."""

    def update(parameter: nn.Parameter) -> None:
        parameter.data.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(update)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("config", [FP8Config(), FP8Config(scaling="rowwise")])
def test_weights_that_no_optimizer_of_torch_writes_are_cast_at_each_step(config: FP8Config, in_backward: bool) -> None:
    step(FP8Linear(48, 32, bias=False))  # an optimizer that stepped before the model was made is not the model's
    model = convert_to_fp8(nn.Sequential(nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 16, bias=False)), config)
    by_hand = None if in_backward else ByHand(model.parameters())
    if in_backward:
        write_in_backward(model.parameters())
    x = torch.randn(16, 48)
    for _ in range(3):
        first, last = model[0], model[2]
        outputs = model(x)
        hidden = torch.tanh(fp8_linear(x, first.weight, first.bias, config=config))
        assert torch.equal(outputs, fp8_linear(hidden, last.weight, config=config))
        outputs.square().sum().backward()
        if by_hand is not None:
            by_hand.step()


def test_each_replay_of_a_step_that_was_captured_makes_weights_stale(graphs, monkeypatch) -> None:
    layer, x = FP8Linear(48, 32, bias=False), torch.randn(16, 48)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step(layer)
    counted = graphs.replay
    step(layer)
    assert graphs.replay is counted  # once, however many steps were captured
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for _ in range(3):
        layer(x)
        before = optimizer_steps()
        graphs(layer).replay()
        assert optimizer_steps() == before + 1  # of which delayed scales are told
        assert torch.equal(layer(x), fp8_linear(x, layer.weight))


def test_replays_do_not_count_where_no_step_was_captured(graphs) -> None:
    layer, x = FP8Linear(48, 32, bias=False), torch.randn(16, 48)
    step(layer)
    layer(x)
    before = freshness.weight_states([layer.weight])
    graphs(FP8Linear(48, 32)).replay()
    assert freshness.weight_states([layer.weight]) == before


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


def another_dtype(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory."""
    weight.data = weight.data.view(torch.int32)


def changed(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        weight.add_(1)


def moved(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    weight.data = weight.data.clone()


def looked_at_again(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    freshness.look_again(weight)


def stepped(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other]).step()


@pytest.mark.parametrize("change", [another_dtype, changed, moved, looked_at_again, stepped])
def test_a_copy_is_stale_when_one_thing_differs(change, monkeypatch) -> None:
    weights = [torch.randn(4, 4) for _ in range(2)]
    copy = freshness.FreshCopy()
    copy.put(weights, "key", "made")
    assert copy.get(weights, "key") == "made"
    change(weights[1], monkeypatch)
    assert copy.get(weights, "key") is None


def test_a_copy_of_a_weight_on_a_gpu_is_of_the_stream_that_made_it(monkeypatch) -> None:
    weight = SimpleNamespace(is_cuda=True, data_ptr=lambda: 16, _version=0, dtype=torch.float32)
    states = []
    for stream in (7, 7, 77):
        monkeypatch.setattr(freshness, "current_stream", lambda tensor, stream=stream: stream)
        states.append(freshness.weight_states([weight]))
    assert states[0] == states[1] != states[2]


def test_a_copy_is_of_its_weights_in_their_order_by_its_key() -> None:
    one, other = torch.randn(4, 4), torch.randn(4, 4)
    copy = freshness.FreshCopy()
    copy.put([one, other], "key", "made")
    for weights in ([other, one], [one], [one, other, other], [one, one], [one, one.view_as(one)]):
        assert copy.get(weights, "key") is None
    assert copy.get([one, other], "another key") is None
    assert copy.get([one, other], "key") == copy.made == "made"
    with copies_are_held():  # a capture has leaves of its own, over the same memory
        assert copy.get([one.view_as(one), other.view_as(other)], "key") == "made"
        assert copy.get([other, one], "key") is None
    copy.forget()
    assert copy.get([one, other], "key") is copy.made is None


def test_a_step_of_anyone_changes_the_state_of_all_weights_and_ends_the_watch() -> None:
    """Also of one whose copy another thread was about to hold."""
    weight = torch.randn(4, 4)
    before = freshness.weight_states([weight])
    assert freshness._Changes.watched
    stepped(weight, None)
    assert not freshness._Changes.watched  # what lies there later is another's
    assert freshness.weight_states([weight]) != before


def test_a_change_that_is_noted_makes_every_copy_of_a_weight_stale() -> None:
    weight, copies = torch.randn(4, 4), [freshness.FreshCopy() for _ in range(2)]
    for copy in copies:
        copy.put([weight], "key", torch.ones(2))
    assert len(list(freshness.fresh_tensors())) >= 2
    version = weight._version
    freshness.note_change([weight])
    assert weight._version > version
    assert [copy.made for copy in copies] == [None, None]
    assert list(freshness.fresh_tensors()) == []
    with torch.inference_mode():
        freshness.note_change([torch.ones(2)])  # which has no version


@pytest.mark.parametrize("what", ["nothing", "input", "weight", "mode", "compiled code", "captured"])
def test_casts_are_used_again_where_none_of_these_is(what, monkeypatch) -> None:
    with torch.inference_mode():
        made = torch.ones(2)
    input, weight = (made if what == name else torch.ones(2) for name in ("input", "weight"))
    if what == "compiled code":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    if what == "captured":
        monkeypatch.setattr(freshness, "captured_without_copies", lambda tensor: tensor is input)
    with torch.inference_mode(what == "mode"):
        assert freshness.reusable(input, weight) is (what == "nothing")


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_capture_on_a_gpu_finds_copies_that_are_held_alone(is_cuda, capturing, held, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with copies_are_held() if held else nullcontext():
        found = freshness.captured_without_copies(SimpleNamespace(is_cuda=is_cuda))
    assert found is (is_cuda and capturing and not held)


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

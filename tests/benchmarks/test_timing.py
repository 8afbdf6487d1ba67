from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.harness.timing import Variant, input_sets, time_interleaved

CPU = torch.device("cpu")


def test_variants_take_turns_and_go_through_their_input_sets() -> None:
    calls = []
    variants = [Variant("a", lambda i: calls.append(("a", i)), sets=3), Variant("b", lambda i: calls.append(("b", i)))]
    timings = time_interleaved(variants, device=CPU, rounds=4, sample_ms=0.01)
    assert list(timings) == ["a", "b"]
    assert all(len(timing.ms.values) == len(timing.host_ms.values) == 4 for timing in timings.values())
    turns = [name for name, _ in itertools.groupby(name for name, _ in calls)]
    assert turns == ["a", "b"] * (len(turns) // 2)
    assert len(turns) == 2 * (1 + 1 + 4)  # warm-up, the round that is not counted, the rounds
    of_a = [index for name, index in calls if name == "a"]
    assert of_a == [0, 1, 2] * (len(of_a) // 3)


def test_a_time_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()  # a second passes between two readings
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    timing = time_interleaved([Variant("a", lambda i: None, sets=4)], device=CPU, rounds=2, sample_ms=3000.0)["a"]
    assert timing.ms.values == (1000 / (3 * 4),) * 2  # a pass lasts 1000 ms, so a sample has three


def test_input_sets_fill_the_cache_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        L2_cache_size = 60

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    cuda = torch.device("cuda")
    assert [input_sets(size, cuda) for size in (120, 119, 60, 50, 1)] == [1, 2, 2, 3, 64]
    assert input_sets(1, CPU) == 1


@pytest.mark.gpu
def test_a_graph_leaves_the_host_out() -> None:
    x = torch.ones(16, device="cuda")

    def many_small(index: int) -> list[torch.Tensor]:
        return [x + 1 for _ in range(200)]

    variants = [Variant("called", many_small), Variant("graph", many_small, graph=True)]
    timings = time_interleaved(variants, device=x.device, rounds=5, sample_ms=5.0)
    assert timings["graph"].ms.median < timings["called"].ms.median
    assert timings["graph"].host_ms.median < timings["called"].host_ms.median

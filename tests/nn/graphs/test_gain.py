"""Layers for which graphs would save no time, by what their first forwards take, are left alone."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fp8booster.comm.observer import observer
from fp8booster.nn.graphs import capture_layers, captured_layers, recorder
from fp8booster.nn.graphs import layer as layer_module
from fp8booster.nn.graphs.layer import TOO_EARLY, WARM_UP
from tests.nn.graphs.rerun import Rerun

FEATURES = 64


class Pair(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x).relu())


@pytest.mark.parametrize(
    ("host", "gpu", "found"),
    [
        # the shortest of the first calls count
        ((9.0, 1.1, 9.0), (2.0, 9.0, 1.6), None),
        ((9.0, 1.0, 9.0), (2.0, 9.0, 1.6), "the GPU takes longer than the host"),
        ((9.0, 1.0, 9.0), (2.0, 9.0, None), TOO_EARLY),  # it is behind
    ],
)
def test_what_graphs_gain_nothing_for_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, host: tuple[float, ...], gpu: tuple[float | None, ...], found: str | None
) -> None:
    monkeypatch.setattr(layer_module, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    rerun = Rerun()
    monkeypatch.setattr(recorder, "recorder_for", lambda _: rerun)
    model = nn.ModuleDict({"layers": nn.ModuleList([Pair(), Pair()])})
    capture_layers(model, only_where_host_limits=True)
    for each in (model["layers"][0], copy.deepcopy(model["layers"][1])):
        clock = (time for each in host for time in (0.0, each))
        took = iter([partial(lambda seconds: seconds, seconds) for seconds in gpu])
        monkeypatch.setattr(rerun, "timer", lambda took=took: lambda: next(took))
        for _ in range(WARM_UP + 2):
            each(torch.randn(2, 8, FEATURES)).sum().backward()
        assert captured_layers(each) == {found: 1}


class Sending(Pair):
    """Two matrices of each of some ranks, whose results are added up."""

    ranks = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        observer.count_plain("all_reduce", self.ranks, y.nbytes, "small")
        return y


@pytest.mark.parametrize(("ranks", "found"), [(2, None), (1, "the GPU takes longer than the host")])
def test_the_time_of_a_gpu_that_waits_for_another_rank_does_not_count(
    monkeypatch: pytest.MonkeyPatch, ranks: int, found: str | None
) -> None:
    monkeypatch.setattr(Sending, "ranks", ranks)
    rerun = Rerun()
    monkeypatch.setattr(recorder, "recorder_for", lambda _: rerun)
    monkeypatch.setattr(rerun, "timer", lambda: lambda: lambda: 9.0)
    layer = Sending()
    capture_layers(nn.ModuleDict({"layers": nn.ModuleList([layer, Sending()])}), only_where_host_limits=True)
    for _ in range(WARM_UP + 2):
        layer(torch.randn(2, 8, FEATURES)).sum().backward()
    assert captured_layers(layer) == {found: 1}


@pytest.mark.gpu
@pytest.mark.parametrize("doublings", [0, 5])
def test_the_gpu_is_timed(device: torch.device, doublings: int) -> None:
    if device.type != "cuda":
        pytest.skip("times a GPU")
    timed = recorder.Recorder(device)
    x = torch.ones(2**23 << doublings, device=device)
    x.mul_(2)  # loads the kernel, which takes milliseconds
    torch.cuda.synchronize()
    end = timed.timer()
    x.mul_(2)
    seconds = end()
    assert seconds() is None or doublings == 0
    torch.cuda.synchronize()
    # reads and writes of 4 bytes each, at 1 to 5 TB/s
    assert 8 * len(x) / 5e12 < seconds() < 8 * len(x) / 1e12 + 5e-3

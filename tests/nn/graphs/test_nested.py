"""A captured layer inside a captured layer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.graphs import capture_layers
from fp8booster.nn.graphs.layer import WARM_UP, LayerGraphs

FEATURES = 32


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(Inner() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def run_inner(outer: nn.Module, device: torch.device) -> None:
    """One step of each layer inside by itself."""
    for layer in outer.layers:
        x = torch.randn(16, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
        layer(x).sum().backward()


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("before", [0, WARM_UP + 2])
def test_the_layer_around_has_all_weights_pinned(device: torch.device, before: int) -> None:
    """Also what it reads behind the layer inside, which may be replayed by then."""
    torch.manual_seed(0)
    eager = nn.ModuleList(Outer() for _ in range(2)).bfloat16().to(device)
    convert_to_fp8(eager, FP8Config(always=True, cuda_graphs=False))
    model = copy.deepcopy(eager)
    for outer in model:
        assert capture_layers(outer) == 2
        for _ in range(before):
            run_inner(outer, device)
    model.zero_grad()
    assert capture_layers(nn.ModuleDict({"layers": model})) == 2
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (eager, model)]
    for step in range(WARM_UP + 3):
        x = torch.randn(16, FEATURES, generator=torch.Generator().manual_seed(step)).bfloat16().to(device)
        found = []
        for each, optimizer in zip((eager, model), optimizers, strict=True):
            made = each[1](each[0](x))
            made.sum().backward()
            found.append([made.detach(), *(parameter.grad for parameter in each.parameters())])
            optimizer.step()
            optimizer.zero_grad()
        assert all(map(torch.equal, *found)), step
    for outer in model:
        assert outer.fp8_graphs.why_not is None
        (kind,) = outer.fp8_graphs._kinds.values()
        read = {id(weight) for use in kind.uses for weight in use.weights}
        assert read == set(map(id, outer.parameters()))


@pytest.mark.usefixtures("record")
def test_a_capture_leaves_the_graphs_of_layers_inside(device: torch.device) -> None:
    """Other leaves stand in place of their parameters, and CUDA forbids to free graphs in the midst of a capture."""
    model = nn.ModuleList(Outer() for _ in range(2)).bfloat16().to(device)
    convert_to_fp8(model, FP8Config(always=True, cuda_graphs=False))
    capture_layers(model[0])
    for _ in range(WARM_UP + 1):
        run_inner(model[0], device)
    graphs: list[LayerGraphs] = [layer.fp8_graphs for layer in model[0].layers]
    kinds = [list(each._kinds.values()) for each in graphs]
    assert [len(kind.pairs) for of_layer in kinds for kind in of_layer] == [1, 1]

    capture_layers(nn.ModuleDict({"layers": model}))
    for _ in range(WARM_UP + 1):
        x = torch.randn(16, FEATURES, device=device, dtype=torch.bfloat16, requires_grad=True)
        model[0](x).sum().backward()
    assert model[0].fp8_graphs.why_not is None
    assert [list(each._kinds.values()) for each in graphs] == kinds
    for of_layer in kinds:
        assert [pair.lacks_graphs for kind in of_layer for pair in kind.pairs] == [False]
    assert [each.why_not for each in graphs] == ["it goes into another CUDA graph"] * 2

"""A replay calls as many functions of Python, however many tensors and weights there are: a GPU waits for it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.harness.calls import python_calls
from benchmarks.host_step import Replays
from fp8booster import capture_layers, convert_to_fp8
from fp8booster.nn.graphs import captured_layers, recorder
from fp8booster.nn.graphs.breaks import run_eagerly
from fp8booster.nn.graphs.layer import WARM_UP
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight

FEATURES = 32

MOST = 90
"""Calls of Python functions in the forward of a replayed layer that an eager call breaks: 81 with Python 3.11 and torch
2.13."""


class Layer(nn.Module):
    """Some matrices; behind them an eager call, which is given tensors that nothing trains."""

    untrained = 1

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(matrices))

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x)
        for other in others:
            x = x + other
        numbers = [torch.full((2,), number, device=x.device) for number in range(self.untrained)]
        return run_eagerly(_added, x, numbers).relu()


def _added(x: torch.Tensor, numbers: list[torch.Tensor]) -> torch.Tensor:
    return x + len(numbers)


def fill(model: nn.Module) -> None:
    """Let the weights of a model be given by an engine."""
    for module in model.modules():
        if isinstance(module, FP8Layer):
            module.fp8_weight = EngineWeight()
            weights = [module.weight]
            module.fp8_weight.fill(weights, Casts(module.fp8_config).quantize_weight(weights[0], transposed=True))


def calls_of_a_replay(untrained: int = 1, matrices: int = 1, others: int = 1, filled: bool = True) -> int:
    layer = convert_to_fp8(Layer(matrices)) if filled else Layer(matrices)
    layer.untrained = untrained
    fill(layer)
    given = [torch.randn(2, 16, FEATURES) for _ in range(1 + others)]
    with patch.object(recorder, "recorder_for", lambda device: Replays()):
        capture_layers(nn.ModuleDict({"layers": nn.ModuleList([layer, Layer(1)])}))
        for _ in range(WARM_UP + 2):
            layer(*given).sum().backward()
        assert captured_layers(layer) == {None: 1}
        return python_calls(lambda: layer(*given))


def test_a_replay_calls_few_functions() -> None:
    assert calls_of_a_replay() < MOST


@pytest.mark.parametrize("many", [{"untrained": 8}, {"matrices": 8}, {"matrices": 8, "filled": False}, {"others": 8}])
def test_a_replay_calls_as_many_functions_however_many_tensors_there_are(many: dict[str, int]) -> None:
    few = {name: value if name == "filled" else 1 for name, value in many.items()}
    assert calls_of_a_replay(**many) == calls_of_a_replay(**few)

"""A strategy that a caller writes trains in every engine, with no change of the package.

Weights are scaled by amaxes that are predicted, as in arXiv 2511.05811: an update of Adam is about as large as its
learning rate, so a weight's amax grows by no more from step to step, and need not be looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.scaling import WEIGHT, RealTime, Scaling, State
from fp8booster.scaling.steps import optimizer_steps
from fp8booster.tensor import QuantizedMatrix
from tests.colossal.hybrid import runs as hybrid
from tests.distributed import ranks
from tests.plugins.test_scaling import plugin_of
from tests.plugins.training import assert_close, boost, train

CLOSE = 1e-2


class Bound(State):
    """The amax of a weight at its first cast, on the device, and the step of that."""

    amax: torch.Tensor | None = None
    step = 0


@dataclass(frozen=True)
class Predicted(Scaling):
    """Weights by predicted amaxes, inputs and gradients in real time."""

    update: float = 1e-3
    """The largest change of a weight in one step."""

    name = "predicted"

    def new_state(self) -> Bound:
        return Bound()

    @property
    def without_state(self) -> RealTime:
        return RealTime()

    def cast(self, role: str, matrix: torch.Tensor, dtype: torch.dtype, *, state: Any, **how: Any) -> QuantizedMatrix:
        if role == WEIGHT:
            if state.amax is None or state.amax.device != matrix.device:
                state.amax, state.step = matrix.abs().amax().float(), optimizer_steps()
            how["amax"] = state.amax + self.update * (optimizer_steps() - state.step)
        return RealTime().cast(role, matrix, dtype, **how)


CONFIG = FP8Config(scaling=Predicted(), emulate=True)


def states(model: nn.Module) -> list[Bound]:
    return [module.fp8_casts.state for module in model.modules() if isinstance(module, FP8Layer)]


def test_it_trains_in_plain_pytorch_by_the_amaxes_that_it_predicts() -> None:
    torch.manual_seed(0)
    model = convert_to_fp8(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(16, 64)
    losses = []
    for _ in range(4):
        loss = model(x).square().mean()
        loss.backward()
        scale = model[0].fp8_weight.inverse_scale
        first, steps = states(model)[0].amax, optimizer_steps() - states(model)[0].step
        torch.testing.assert_close(scale, (first + 1e-3 * steps) / 448)
        assert scale * 448 >= model[0].weight.detach().abs().amax() * (1 - 1e-6)  # nothing saturates
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert "predicted scales" in report(model).rows[0].notes


@ranks(2)
@pytest.mark.parametrize("name", ["low_level_zero", "gemini", "fsdp"])
def test_it_trains_in_engines_which_send_such_weights_in_16_bits(name: str) -> None:
    optimizer = torch.optim.Adam if name == "gemini" else torch.optim.AdamW
    real_time = FP8Config(emulate=True)
    right = train(boost(plugin_of(name, real_time), optimizer=optimizer, lr=1e-3), steps=4)
    run = boost(plugin_of(name, CONFIG), optimizer=optimizer, lr=1e-3)
    losses = train(run, steps=4)
    assert_close(right, losses, CLOSE, gradients=False)
    assert losses != right
    cast = [each for each in states(run.model.unwrap()) if each.amax is not None]
    assert cast, "no layer has cast its weight by the strategy"


@ranks(2)
def test_it_trains_under_tensor_parallelism() -> None:
    right = hybrid.learn(hybrid.start(hybrid.fp8("TP2 ZeRO 1", fp8_config=FP8Config(emulate=True))), last=4)
    losses = hybrid.learn(hybrid.start(hybrid.fp8("TP2 ZeRO 1", fp8_config=CONFIG)), last=4)
    assert_close(right, losses, CLOSE, gradients=False)
    assert losses != right

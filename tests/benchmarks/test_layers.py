from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.layers.layer import Inputs, step
from benchmarks.layers.ours import OURS
from benchmarks.layers.peers import BASELINE, PEERS
from fp8booster.scaling import real_time

M, K, N = 32, 64, 48


@pytest.fixture
def work() -> tuple[nn.Parameter, Inputs]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(N, K, dtype=torch.bfloat16))
    return weight, Inputs.random(M, K, N, torch.device("cpu"))


@pytest.fixture
def casts(monkeypatch) -> list[tuple[tuple[int, ...], bool]]:
    """Shape of each matrix that is cast, and whether its amax was given."""
    seen = []
    real = real_time.cast

    def cast(matrix: torch.Tensor, *arguments: object, **options: object) -> object:
        seen.append((tuple(matrix.shape), options["amax"] is not None))
        return real(matrix, *arguments, **options)

    monkeypatch.setattr(real_time, "cast", cast)
    return seen


X, DY, W = (M, K), (M, N), (N, K)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp8booster", [(X, False), (DY, False)]),
        ("fp8booster-amax", [(X, True), (DY, OURS["fp8booster-amax"].dy_amax_given)]),
        ("fp8booster-cold", [(X, False), (W, False), (DY, False)]),
    ],
)
def test_every_step_casts_what_it_says(name, expected, work, casts) -> None:
    weight, inputs = work
    forward = OURS[name].build(weight)
    step(forward, weight, inputs)
    casts.clear()
    step(forward, weight, inputs)
    step(forward, weight, inputs)
    assert casts == expected * 2
    given = OURS[name]
    assert [amax for shape, amax in expected if shape != W] == [given.x_amax_given, given.dy_amax_given]


@pytest.mark.parametrize("name", ["fp8booster", "fp8booster-amax", "fp8booster-cold"])
def test_ours_train_like_bf16(name, work) -> None:
    weight, inputs = work

    def train(forward) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight.grad = None
        x = inputs.x.detach().requires_grad_()
        y = forward(x, inputs)
        y.backward(inputs.dy)
        return y.detach(), x.grad, weight.grad

    for ours, exact in zip(train(OURS[name].build(weight)), train(PEERS[BASELINE].build(weight)), strict=True):
        assert (ours - exact).float().norm() < 0.1 * exact.float().norm()


def test_a_step_leaves_one_gradient(work) -> None:
    weight, inputs = work
    forward = PEERS[BASELINE].build(weight)
    step(forward, weight, inputs)
    first = weight.grad
    step(forward, weight, inputs)
    assert torch.equal(weight.grad, first)
    assert inputs.x.grad is None


def test_a_missing_peer_says_so() -> None:
    reason = PEERS["te"].why_missing()
    assert reason in (None, "transformer_engine is not installed")
    assert PEERS[BASELINE].why_missing() is None

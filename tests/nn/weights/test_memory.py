"""Which copies of FP8 weights are kept where the configuration leaves it open."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.config import WeightCopies
from fp8booster.nn.weights import memory
from fp8booster.nn.weights.memory import fits

VALUES = 64 * 64


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16))


@pytest.fixture
def gpu_memory(monkeypatch, request) -> None:
    monkeypatch.setattr(memory, "gpu_memory", lambda: request.param)


@pytest.mark.parametrize(
    ("gpu_memory", "one_byte", "two_bytes"),
    [(None, True, True), (64 * VALUES, True, True), (63 * VALUES, True, False), (31 * VALUES, False, False)],
    indirect=["gpu_memory"],
)
def test_copies_that_take_more_than_a_32nd_of_the_gpu_are_dropped(gpu_memory, one_byte, two_bytes) -> None:
    assert fits(model(), bytes_a_value=1) is one_byte
    assert fits(model(), bytes_a_value=2) is two_bytes


@pytest.mark.parametrize("gpu_memory", [31 * VALUES], indirect=True)
@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (FP8Config(emulate=True), False),
        (FP8Config(emulate=True, weight_copies=WeightCopies(transposes=True)), True),
        (FP8Config(emulate=True, scaling="rowwise"), True),
    ],
)
def test_a_conversion_decides_on_transposes_once_and_backward_makes_those_that_are_dropped(
    gpu_memory, config, kept
) -> None:
    converted = convert_to_fp8(model(), config)
    layer = converted[0]
    assert layer.fp8_config.keeps_transposes is kept
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    converted(x).sum().backward()
    assert layer.fp8_weight.held.transpose.numel() == kept * VALUES
    always = convert_to_fp8(
        model(), FP8Config(emulate=True, scaling=config.granularity, weight_copies=WeightCopies(transposes=True))
    )
    always.load_state_dict(converted.state_dict())
    other = x.detach().requires_grad_()
    always(other).sum().backward()
    assert torch.equal(x.grad, other.grad)

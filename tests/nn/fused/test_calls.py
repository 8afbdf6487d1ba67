"""How much Python a fused decoder layer runs, as a GPU would wait for it: a small model is bound by that."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness.calls import idle_gpu, python_calls
from benchmarks.training import one_layer
from fp8booster import FP8Config
from fp8booster.nn.fused.self_attention import FusedAttention
from fp8booster.training.models import MODELS

MOST = 650
"""Calls of Python functions in one step, more than those of the plain layer: 644 with Python 3.11 and torch 2.13."""


def calls_of_a_step(name: str) -> int:
    """Of a layer of `one_layer.LAYERS`, forward and backward, once its weights are cast and its kernels compiled."""
    decoder = one_layer.Decoder.of(MODELS["micro"], 32, torch.device("cpu"))
    forward = one_layer.LAYERS[name][1](decoder, FP8Config())
    attention = decoder.model.model.layers[0].self_attn
    assert isinstance(attention, FusedAttention) == (name != one_layer.BASELINE)
    x = torch.randn(1, 32, 64, dtype=torch.bfloat16)

    def step() -> None:
        forward(x.detach().requires_grad_()).backward(x)

    for _ in range(3):
        step()
    return python_calls(step)


def test_a_fused_layer_in_fp8_calls_few_functions() -> None:
    pytest.importorskip("triton")
    with idle_gpu():
        plain, fused = calls_of_a_step(one_layer.BASELINE), calls_of_a_step("fp8booster-fused")
    assert plain < fused < plain + MOST


def test_calls_are_counted_with_those_of_the_backward() -> None:
    def hook(gradient: torch.Tensor) -> None:
        pass

    x = torch.ones(1, requires_grad=True)
    y = 2 * x
    without = python_calls(lambda: torch.autograd.grad(y, x, retain_graph=True))
    y.register_hook(hook)
    assert python_calls(lambda: torch.autograd.grad(y, x)) == without + 1

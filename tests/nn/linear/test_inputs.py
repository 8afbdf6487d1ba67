"""Inputs that are no plain tensors: nested ones, and those by which others record what a model does."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fp8booster import FP8Config, convert_to_fp8, quantize

LAYOUTS = (torch.jagged, torch.strided)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return convert_to_fp8(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), Conv1D(32, 48)), FP8Config(always=True))


@pytest.mark.parametrize("layout", LAYOUTS, ids=["jagged", "strided"])
@pytest.mark.parametrize("shape", [(32,), (2, 32)], ids=["tokens", "heads"])
def test_a_nested_tensor_gives_what_its_rows_give_at_once(layout: torch.layout, shape: tuple[int, ...]) -> None:
    parts = [torch.randn(length, *shape) for length in (5, 1, 8)]
    model, of_rows = layers(), layers()
    rows = torch.cat(parts).requires_grad_()
    expected = of_rows(rows)
    expected.square().sum().backward()
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=True)
    output = model(nested)
    if layout is torch.jagged:
        output = output + nested  # its ragged size is still that of the input
        expected = expected + rows
    found = torch.cat(output.unbind())
    assert torch.equal(found, expected)
    torch.cat(model(nested).unbind()).square().sum().backward()
    assert torch.equal(torch.cat(nested.grad.unbind()), rows.grad)
    for one, other in zip(model.parameters(), of_rows.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_ragged_features_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(4, 32), torch.randn(4, 16)], layout=torch.jagged)
    with pytest.raises((ValueError, RuntimeError)):
        layers()(nested)
    ragged_end = torch.nested.nested_tensor([torch.randn(5, 32), torch.randn(3, 32)], layout=torch.jagged)
    with pytest.raises(ValueError, match="the features of a nested tensor are ragged"):
        layers()(ragged_end.transpose(1, 2))


@pytest.mark.parametrize("how", ["training", "evaluation", "frozen"])
def test_fx_records_calls_of_layers_that_stay_in_fp8(how: str) -> None:
    model = layers().train(how == "training")
    if how == "frozen":
        quantize(model)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    x = torch.randn(16, 32)
    assert torch.equal(traced(x), model(x))
    other = copy.deepcopy(traced)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(2)
    assert torch.equal(traced(x), model(x))  # it reads the weights as they are
    assert not torch.equal(other(x), model(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_trace_of_torch_jit_is_refused(training: bool) -> None:
    model, x = layers().train(training), torch.randn(16, 32)
    expected = model(x)
    with torch.set_grad_enabled(training), pytest.raises(TypeError, match=r"use torch\.compile or torch\.export"):
        torch.jit.trace(model, x)
    assert torch.equal(model(x), expected)

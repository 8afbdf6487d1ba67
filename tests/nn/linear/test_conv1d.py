from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.nn import fp8_linear
from fp8booster.nn.linear.conv1d import FP8Conv1D
from tests.nn.models import tiny_gpt2


def run(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = layer(x)
    return y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)


@pytest.mark.parametrize("config", [FP8Config(), FP8Config(scaling="rowwise"), FP8Config(scaling="blockwise")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 96), (100, 250)])
def test_it_computes_the_bits_of_a_linear_layer_of_the_transposed_weight(device, dtype, config, sizes) -> None:
    inputs, outputs = sizes
    layer = Conv1D(outputs, inputs).to(device, dtype)
    nn.init.normal_(layer.bias)
    weight = layer.weight.detach().t().contiguous().requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    x = torch.randn(3, 7, inputs, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(3, 7, outputs, device=device, dtype=dtype)
    FP8Conv1D.convert_in_place(layer, config)
    y, dx, dw, db = run(layer, x, dy)
    expected = fp8_linear(x, weight, bias, config)
    dx_expected, dw_expected, db_expected = torch.autograd.grad(expected, (x, weight, bias), dy)
    assert dw.shape == layer.weight.shape
    for one, other in ((y, expected), (dx, dx_expected), (dw, dw_expected.t()), (db, db_expected)):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_every_projection_of_a_gpt2_is_converted_in_place_and_listed() -> None:
    model = tiny_gpt2()
    modules, parameters, state = list(model.modules()), list(model.parameters()), list(model.state_dict())
    before = report(model)
    assert [row.notes for row in before.rows] == ["use_fp8 is off"] * 9
    convert_to_fp8(model)
    assert all(one is other for one, other in zip(modules, model.modules(), strict=True))
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == state
    assert sum(isinstance(module, FP8Conv1D) for module in model.modules()) == 8
    result = report(model)
    assert (len(result.fp8), [row.name for row in result.other]) == (8, ["lm_head"])
    shapes = {row.name.rpartition("h.0.")[2]: row.shape for row in result.rows}
    assert shapes["attn.c_attn"] == (64, 192)
    assert shapes["mlp.c_proj"] == (256, 64)
    assert [row.shape for row in before.rows] == [row.shape for row in result.rows]


def test_the_predicate_and_the_sizes_decide_as_for_linear_layers() -> None:
    model = nn.ModuleDict({"odd": Conv1D(17, 32), "out": Conv1D(32, 32), "in": nn.Linear(32, 32)})
    convert_to_fp8(model, FP8Config(layers=lambda name, module: name != "out"))
    assert (type(model["odd"]), type(model["out"]), type(model["in"])) == (Conv1D, Conv1D, FP8Linear)
    notes = {row.name: row.notes for row in report(model).rows}
    assert "32 x 17 features" in notes["odd"]
    assert notes["out"] == "FP8Config.layers leaves it out"
    convert_to_fp8(model)
    assert type(model["out"]) is FP8Conv1D
    convert_to_fp8(model, FP8Config(layers=lambda name, module: name == "in"))
    assert type(model["out"]) is Conv1D


def test_an_empty_batch_and_evaluation(device) -> None:
    layer = Conv1D(32, 32).to(device)
    FP8Conv1D.convert_in_place(layer, FP8Config(always=True))
    assert layer(torch.empty(0, 32, device=device)).shape == (0, 32)
    x = torch.randn(4, 32, device=device)
    trained = layer(x)
    assert torch.equal(layer.eval()(x), trained)


def test_a_gpt2_trains_as_it_does_in_high_precision(device) -> None:
    plain = tiny_gpt2().to(device)
    fp8 = convert_to_fp8(copy.deepcopy(plain), FP8Config(emulate=True))
    tokens = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0)).to(device)
    curves = []
    for model in (plain, fp8):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        curve = []
        for _ in range(15):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0][-1] < curves[0][0] - 0.5
    torch.testing.assert_close(curves[1], curves[0], rtol=0.01, atol=0)
    assert curves[1] != curves[0]


def test_transformers_is_not_imported_for_it() -> None:
    program = (
        "import sys, torch, fp8booster; fp8booster.convert_to_fp8(torch.nn.Linear(32, 32)); "
        "assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

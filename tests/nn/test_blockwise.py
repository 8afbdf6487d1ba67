"""Layers with blockwise scales: one for each 128 values of inputs and gradients, and each 128 x 128 of weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, fp8_linear, report
from fp8booster.config import Activations, WeightCopies
from fp8booster.nn.fused.merged_layers import merged_layers
from tests.kernels.matrices import quantize
from tests.nn import reference
from tests.nn.fused.models import batch, build
from tests.nn.fused.test_decoder import fused

CONFIG = FP8Config(scaling="blockwise")


def tensors(rows: int, inputs: int, outputs: int, device: torch.device) -> list[torch.Tensor]:
    """x, w and dy whose magnitude differs from one group of features and of tokens to the next."""
    x = torch.randn(rows, inputs, device=device)
    w = 0.02 * torch.randn(outputs, inputs, device=device)
    dy = 1e-3 * torch.randn(rows, outputs, device=device)
    x[:, : inputs // 2] *= 3000
    dy[: rows // 2] *= 3000
    return [x, w, dy]


def run(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, config: FP8Config) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    y = fp8_linear(*leaves, config=config)
    y.backward(dy)
    return [y.detach(), leaves[0].grad, leaves[1].grad]


@pytest.mark.parametrize("sizes", [(256, 384, 512), (200, 260, 72), (1, 128, 1)])
def test_the_three_products_are_those_of_the_quantized_operands(sizes, device) -> None:
    rows, inputs, outputs = sizes
    x, w, dy = tensors(*sizes, device)
    kinds = {"power_of_two": True}
    x8, dy8 = (quantize(each, torch.float8_e4m3fn, scale_for="group", **kinds) for each in (x, dy))
    x8_t, dy8_t = (
        quantize(each, torch.float8_e4m3fn, plain=False, transposed=True, scale_for="group", **kinds)
        for each in (x, dy)
    )
    w8 = quantize(w, torch.float8_e4m3fn, scale_for="block", **kinds).dequantize(outputs, inputs).double()
    one, gradient = x8.dequantize(rows, inputs).double(), dy8.dequantize(rows, outputs).double()
    one_t, gradient_t = x8_t.dequantize(rows, inputs).double(), dy8_t.dequantize(rows, outputs).double()
    expected = [one @ w8.t(), gradient @ w8, gradient_t.t() @ one_t]
    for found, exact in zip(run(x, w, dy, CONFIG), expected, strict=True):
        assert found.is_contiguous()
        # a Hopper GPU's accumulator keeps 14 bits
        assert reference.signal_to_noise(exact, found) > (55 if device.type == "cuda" else 70)


def test_small_groups_keep_their_bits_where_one_scale_loses_them(device) -> None:
    x, w, dy = tensors(256, 256, 128, device)
    x[:, :128] *= 100  # 300000 times the others
    w[:, :128] = 0  # so that the output is made of the others alone
    exact = reference.exact_linear(x, w, dy).output
    found, coarse = (run(x, w, dy, config)[0] for config in (CONFIG, FP8Config()))
    assert reference.signal_to_noise(exact, found) > 25
    assert reference.signal_to_noise(exact, coarse) < 10


def test_the_report_shows_what_is_padded_and_what_is_too_small(device) -> None:
    model = nn.ModuleList([nn.Linear(256, 1000), nn.Linear(256, 384), nn.Linear(256, 64)]).to(device)
    convert_to_fp8(model, CONFIG)
    model[0](torch.randn(130, 256, device=device))
    model[1](torch.randn(128, 256, device=device))
    padded, whole, small = report(model).rows
    assert padded.notes == "padded: out 1000->1024, tokens 130->256"
    assert whole.notes == ""
    assert small.precision == "FP32"
    assert "rounded up to multiples of 128, would make its products 2.00 times larger" in small.notes


@pytest.mark.parametrize("keep", [False, True])
def test_a_transpose_that_is_made_in_backward_has_the_same_bits(keep, device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.ReLU(), nn.Linear(384, 256)).to(device)
    other = copy.deepcopy(model)
    convert_to_fp8(model, CONFIG)
    convert_to_fp8(other, FP8Config(scaling="blockwise", weight_copies=WeightCopies(transposes=keep)))
    x = torch.randn(128, 256, device=device)
    for each in (model, other):
        each(x).square().sum().backward()
    for one, same in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, same.grad)


@pytest.mark.parametrize("saved", ["16-bit", "8-bit"])
def test_a_decoder_trains_with_merged_layers_and_a_head_in_fp8(saved) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "vocab_size": 384}
    exact = build(dtype=torch.float32, **sizes)
    config = FP8Config(scaling="blockwise", vocabulary_head=True, activations=Activations(saved=saved))
    model = fused(build(**sizes), config)
    losses = []
    for each in (exact, model):
        loss = each(input_ids=batch(), labels=batch()).loss
        loss.backward()
        losses.append(loss.item())
    groups = merged_layers(model)
    assert groups
    assert all(group.why_not_merged is None for group in groups)
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    found = dict(model.named_parameters())
    for name, parameter in exact.named_parameters():
        if name.endswith("proj.weight") or name == "lm_head.weight":
            assert reference.signal_to_noise(parameter.grad, found[name].grad) > 15, name


def test_compiled_code_has_the_bits_of_eager(device) -> None:
    torch._dynamo.reset()
    x, w, dy = tensors(128, 256, 128, device)
    compiled = torch.compile(fp8_linear, fullgraph=True)
    results = []
    for function in (fp8_linear, compiled):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = function(*leaves, config=CONFIG)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    torch._dynamo.reset()

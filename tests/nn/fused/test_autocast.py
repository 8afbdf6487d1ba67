"""Models under `torch.autocast`, as Trainer and Accelerate run them with `bf16=True`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fp8booster import FP8Config, Report, convert_to_fp8, fuse, report
from fp8booster.nn.fused import fused_summary
from fp8booster.nn.fused.caches import CACHES
from tests.nn.fused.models import INSTALLED, batch, build
from tests.nn.fused.test_decoder import sqnr
from tests.plugins.test_low_level_zero_census import Census

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def step(model: nn.Module, autocast: bool, **more: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradients of parameters by name."""
    model.zero_grad()
    with torch.autocast("cpu", BF16, enabled=autocast):
        loss = model(input_ids=batch(), labels=batch(), **more).loss
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return loss.item(), found


def trained(family: str, in_fp8: bool, dtype: torch.dtype, autocast: bool) -> tuple[nn.Module, float, dict, Census]:
    """A model that has computed a step as Trainer does, `use_cache` left on, and the products of the step."""
    model = build(family, dtype, use_cache=True)
    if in_fp8:
        convert_to_fp8(model, FP8Config())
    fuse(model)
    with Census() as counted:
        loss, gradients = step(model, autocast)
    return model, loss, gradients, counted


def told(found: Report) -> tuple:
    """What a report says of the fused parts."""
    return (
        # how many tokens an expert gets is a matter of rounding
        [(row.name, row.passes, row.notes.split("padded")[0]) for row in found.fp8],
        found.merged,
        found.grouped,
        found.unfused_calls,
        found.changed,
        found.captured,
    )


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize("family", INSTALLED)
def test_what_is_fused_is_fused_under_autocast(family: str, in_fp8: bool, dtype: torch.dtype) -> None:
    plain, _, right, products = trained(family, in_fp8, BF16, autocast=False)
    model, loss, gradients, found = trained(family, in_fp8, dtype, autocast=True)
    assert fused_summary(model) == fused_summary(plain)
    if in_fp8:
        assert told(report(model)) == told(report(plain))
    assert found.fp8 == products.fp8
    exact_loss, exact = step(build(family, FP32), autocast=False)
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    if any("expert" in name for name in exact):  # a router's rounding decides which experts a token gets
        return
    for name, gradient in exact.items():
        assert sqnr(gradients[name], gradient) > sqnr(right[name], gradient) - 4, name


@pytest.mark.parametrize("in_fp8", [True, False])
@pytest.mark.parametrize("family", sorted(set(INSTALLED) - {"gpt2", "gpt_neox", "stablelm"}))  # PyTorch's LayerNorm
def test_parameters_in_fp16_are_trained_under_autocast_of_bf16(family: str, in_fp8: bool) -> None:
    plain, *_ = trained(family, in_fp8, BF16, autocast=False)
    model, loss, gradients, _ = trained(family, in_fp8, FP16, autocast=True)
    assert fused_summary(model) == fused_summary(plain)
    exact_loss, exact = step(build(family, FP32), autocast=False)
    assert loss == pytest.approx(exact_loss, rel=2e-3)
    if any("expert" in name for name in exact):
        return
    for name, gradient in exact.items():
        if gradient.dim() > 1:  # those of biases are next to nothing in FP16
            assert sqnr(gradients[name], gradient) > 12, name


def test_weights_are_cast_from_the_parameters_in_fp32() -> None:
    """Not from values that were rounded to 16 bits before."""
    model = convert_to_fp8(build(dtype=FP32), FP8Config())
    fuse(model)
    attention = model.model.layers[0].self_attn
    q_proj = attention.q_proj
    with torch.no_grad():
        # halfway between two values of E4M3 in BF16, and above it in FP32
        q_proj.weight.fill_(1.0)
        q_proj.weight[0, 0] = 448.0
        q_proj.weight[1, 1] = 1.0625 + 2**-12
    step(model, autocast=True)
    held = attention.fp8_merged.fp8_weight.held
    assert held.data[1, 1].float() * held.inverse_scale == 1.125


@pytest.mark.parametrize("in_fp8", [True, False])
def test_gradients_are_in_fp32_where_parameters_are(in_fp8: bool) -> None:
    _, _, gradients, _ = trained("llama", in_fp8, FP32, autocast=True)
    assert {gradient.dtype for gradient in gradients.values()} == {FP32}
    projections = [gradient for name, gradient in gradients.items() if "q_proj" in name or "gate_proj" in name]
    # FP8 products are summed in FP32 and rounded once, to the weight's dtype
    assert all(gradient.ne(gradient.to(BF16)).any() for gradient in projections) == in_fp8


@pytest.mark.parametrize("family", INSTALLED)
def test_a_call_that_trains_makes_no_cache_unless_asked(family: str) -> None:
    model = build(family, use_cache=True)
    fuse(model)
    calls: list[Any] = []
    bodies = [each for each in model.children() if any(True for _ in each.children())]
    bodies[0].register_forward_hook(lambda *given: calls.append(given[-1]))

    def made(**given: Any) -> bool:
        output = model(input_ids=batch(), **given)
        held = [getattr(each, name, None) for each in (output, calls[-1]) for name in CACHES[:2]]
        return any(each is not None for each in held)

    assert not made(labels=batch())
    assert not made()  # as DPO and GRPO call it, for the logits
    assert not made(use_cache=None)
    makes_one = transformers.__version__ >= "5" or family not in ("gemma2", "gemma3_text", "cohere2")
    assert made(use_cache=True) == makes_one
    with torch.no_grad():  # it may generate
        assert made() == makes_one
    model.eval()
    assert made()
    assert model.config.use_cache is True


def test_a_copy_makes_no_cache_either() -> None:
    model = build(use_cache=True)
    fuse(model)
    assert copy.deepcopy(model)(input_ids=batch()).past_key_values is None

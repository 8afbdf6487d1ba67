"""What is fused around products, differentiable, against what torch and transformers compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from fp8booster.nn.fused.pointwise import layer_norm, rms_norm
from fp8booster.nn.linear.delivered_amax import delivered_amax
from fp8booster.scaling import amax_of

SIZE = 48

NORMS: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "RMS norm": (lambda: nn.RMSNorm(SIZE, 1e-6), lambda m, *x: rms_norm(x[0], m.weight, 1e-6, *x[1:])),
    "Gemma's": (
        lambda: GemmaRMSNorm(SIZE, 1e-6),
        lambda m, *x: rms_norm(x[0], m.weight, m.eps, *x[1:], unit_offset=True),
    ),
    "layer norm": (
        lambda: nn.LayerNorm(SIZE, 1e-5, bias=False),
        lambda m, *x: layer_norm(x[0], m.weight, m.bias, m.eps, *x[1:]),
    ),
    "layer norm with a bias": (
        lambda: nn.LayerNorm(SIZE, 1e-5),
        lambda m, *x: layer_norm(x[0], m.weight, m.bias, m.eps, *x[1:]),
    ),
}


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_that_of_its_module(name: str, added: bool, device: torch.device) -> None:
    make, fused = NORMS[name]
    module = make().to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    given = [torch.randn(2, 5, SIZE, device=device, requires_grad=True) for _ in range(1 + added)]
    dy, dh = torch.randn(2, 2, 5, SIZE, device=device)
    leaves = [*given, *module.parameters()]
    h = sum(given)
    right = [module(h), h]
    found = fused(module, *given)
    assert torch.equal(delivered_amax(found[0]).amax(), amax_of(found[0]))
    gradients = [torch.autograd.grad(made, leaves, [dy, dh]) for made in (found, right)]
    for one, other in zip([*found, *gradients[0]], [*right, *gradients[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)

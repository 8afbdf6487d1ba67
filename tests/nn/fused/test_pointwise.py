"""What is fused around products, differentiable, against what torch and transformers compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_partly

from fp8booster.formats import E4M3
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.fused.pointwise import PLAIN, Saving, activate, rotate_heads, row_norm, split_and_rotate
from fp8booster.nn.weights.delivered import delivered_amax, delivered_recipe
from tests.kernels.matrices import quantize

SIZE = 48

NORMS: dict[str, tuple[Callable[[], nn.Module], Callable]] = {
    "RMS norm": (lambda: nn.RMSNorm(SIZE, 1e-6), lambda m, x, *h, **how: row_norm(x, m.weight, 1e-6, *h, **how)),
    "Gemma's": (
        lambda: GemmaRMSNorm(SIZE, 1e-6),
        lambda m, x, *h, **how: row_norm(x, m.weight, m.eps, *h, unit_offset=True, **how),
    ),
    "layer norm": (
        lambda: nn.LayerNorm(SIZE, 1e-5, bias=False),
        lambda m, x, *h, **how: row_norm(x, m.weight, m.eps, *h, bias=m.bias, centered=True, **how),
    ),
    "layer norm with a bias": (
        lambda: nn.LayerNorm(SIZE, 1e-5),
        lambda m, x, *h, **how: row_norm(x, m.weight, m.eps, *h, bias=m.bias, centered=True, **how),
    ),
}
SAVINGS = [PLAIN, Saving(recompute=True), Saving(in_8_bits=True), Saving(in_8_bits=True, recompute=True)]


@pytest.mark.parametrize("saving", SAVINGS)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_that_of_its_module(name: str, added: bool, saving: Saving, device: torch.device) -> None:
    make, fused = NORMS[name]
    module = make().to(device)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    given = [torch.randn(2, 5, SIZE, device=device, requires_grad=True) for _ in range(1 + added)]
    dy, dh = torch.randn(2, 2, 5, SIZE, device=device)
    leaves = [*given, *module.parameters()]
    h = sum(given)
    right = [module(h), h]
    found = fused(module, *given, saving=saving)
    assert torch.equal(delivered_amax(found[0]).amax(), amax_of(found[0]))
    check_recipe(found[0], saving)
    with torch.no_grad():
        assert torch.equal(fused(module, *given)[0], found[0])
        assert delivered_recipe(fused(module, *given, saving=saving)[0]) is None
    gradients = [torch.autograd.grad(made, leaves, [dy, dh], retain_graph=True) for made in (found, right)]
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    near = {"rtol": 0.1, "atol": 0.1} if saving.in_8_bits else {"rtol": 2e-5, "atol": 2e-5}
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **near)
    # where only one of the two is read
    for number, gradient in enumerate((dy, dh)):
        alone = [torch.autograd.grad(made[number], given, gradient, retain_graph=True) for made in (found, right)]
        for one, other in zip(*alone, strict=True):
            torch.testing.assert_close(one, other, **near)


def check_recipe(found: torch.Tensor, saving: Saving) -> None:
    """Check what its recipe makes of what was just made: it, and the transpose of its cast."""
    recipe = delivered_recipe(found)
    assert (recipe is not None) == saving.recompute
    if recipe is None:
        return
    rows = found.detach().flatten(0, -2)
    again, amax = recipe.matrix(*recipe.saved)
    near = {"rtol": 0.1, "atol": 0.05} if saving.in_8_bits else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(again, rows, **near)
    assert again.dtype is found.dtype
    assert torch.equal(amax.amax(), amax_of(again))
    if recipe.transpose is not None:
        for options in ({"dtype": E4M3}, {"dtype": torch.float8_e5m2, "power_of_two": True}):
            transpose, scale = recipe.transpose(*recipe.saved, **options)
            expected = quantize(rows, options.pop("dtype"), **options)
            torch.testing.assert_close(scale, expected.inverse_scale)
            values = transpose.float()[: rows.shape[1], : len(rows)].t() * scale
            wanted = expected.dequantize(*rows.shape)
            torch.testing.assert_close(values, wanted, **near | ({"rtol": 0.3} if saving.in_8_bits else {}))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("name", ["RMS norm", "layer norm with a bias"])
def test_a_sum_of_two_types_is_of_the_wider_one(name: str, dtypes: tuple) -> None:
    """As under autocast: a block's output has 16 bits, and what it is added to 32."""
    make, fused = NORMS[name]
    module = make()
    x, residual = (torch.randn(4, SIZE).to(dtype).requires_grad_() for dtype in dtypes)
    y, h = fused(module, x, residual)
    assert y.dtype is h.dtype is torch.float32
    torch.testing.assert_close(h, x.float() + residual.float())
    torch.testing.assert_close(y, module(h.detach()))
    gradients = torch.autograd.grad(y.square().sum(), [x, residual])
    assert [each.dtype for each in gradients] == list(dtypes)
    torch.testing.assert_close(*[each.float() for each in gradients], rtol=0.01, atol=0.01)


@pytest.mark.parametrize("saving", SAVINGS)
@pytest.mark.parametrize("gated", [True, False])
def test_an_activation_is_that_of_torch(gated: bool, saving: Saving, device: torch.device) -> None:
    x = torch.randn(2, 5, 2 * SIZE, device=device, requires_grad=True)
    if gated:
        found, right = activate(x, "gelu_tanh", gated=True, saving=saving), F.gelu(x[..., :SIZE], approximate="tanh")
        right = right * x[..., SIZE:]
    else:
        found, right = activate(x, "gelu", saving=saving), F.gelu(x)
    assert torch.equal(delivered_amax(found).amax(), amax_of(found))
    torch.testing.assert_close(found, right)
    check_recipe(found, saving)
    with torch.no_grad():
        alone = activate(x, "gelu_tanh", gated=True, saving=saving) if gated else activate(x, "gelu", saving=saving)
        assert torch.equal(alone, found)
        assert delivered_recipe(alone) is None
    near = {"rtol": 0.1, "atol": 0.05} if saving.in_8_bits else {}
    dy = torch.randn_like(found)
    dx = [torch.autograd.grad(y, x, dy)[0] for y in (found, right)]
    torch.testing.assert_close(*dx, **near)


@pytest.mark.parametrize("apart", [False, True])
def test_a_part_of_a_head_is_rotated_as_neighbours(apart: bool, device: torch.device) -> None:
    qkv = torch.randn(2, 5, 8 * 16, device=device, requires_grad=True)
    angle = torch.randn(1, 5, 4, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    query, key, value = qkv.unflatten(-1, (8, 16)).split([4, 2, 2], 2)
    right = [*apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2), value]
    if apart:
        query, key = (each.contiguous() + 0 for each in (query, key))
        found = [*rotate_heads(query, key, cos, sin, interleaved=True), value]
    else:
        found = split_and_rotate(qkv + 0, cos, sin, query_heads=4, key_heads=2, interleaved=True)
    dy = [torch.randn_like(each) for each in right]
    gradients = [torch.autograd.grad(each, qkv, dy)[0] for each in (found, right)]
    for one, other in zip([*found, gradients[0]], [*right, gradients[1]], strict=True):
        torch.testing.assert_close(one, other)


def test_heads_that_lie_together_by_groups_are_rotated(device: torch.device) -> None:
    """As GPT-NeoX has them, and with two heads of queries for one of keys."""
    angle = torch.randn(1, 5, 4, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    for queries in (1, 2):
        qkv = torch.randn(2, 5, 3 * (queries + 2) * 16, device=device, requires_grad=True)
        query, key, value = qkv.unflatten(-1, (3, queries + 2, 16)).split([queries, 1, 1], 3)
        heads = [each.flatten(2, 3) for each in (query, key, value)]
        right = [*apply_partly(*heads[:2], cos, sin, unsqueeze_dim=2), heads[2]]
        found = split_and_rotate(qkv + 0, cos, sin, query_heads=3 * queries, key_heads=3, groups=3)
        dy = [torch.randn_like(each) for each in right]
        gradients = [torch.autograd.grad(each, qkv, dy)[0] for each in (found, right)]
        for one, other in zip([*found, gradients[0]], [*right, gradients[1]], strict=True):
            torch.testing.assert_close(one, other)

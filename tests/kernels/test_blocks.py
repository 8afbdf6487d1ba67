"""The kernels of a decoder layer's pointwise parts against their references, interpreted and on a GPU."""

from __future__ import annotations

import functools
from importlib import import_module
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

from fp8booster.kernels import activation, rope, row_norm, token_rows
from tests.kernels.blocks import NORMS, activation_cases, differences, norm_cases, rope_cases, token_cases
from tests.kernels.interpreted import interpreted

ROPES = [(1, 3, 2, 2, 16, 16), (2, 2, 6, 2, 8, 4), (2, 3, 33, 1, 96, 96), (1, 2, 3, 1, 80, 20)]


def what_differs() -> dict[str, list[str]]:
    """The small cases, by the interpreter."""
    from fp8booster.kernels import row_norm_triton

    torch.manual_seed(0)
    device = torch.device("cpu")
    row_norm_triton._launch.cache_clear()
    with patch.multiple(row_norm_triton, WARPS=2, FEWEST_PROGRAMS=2):  # so few that a program takes several rows
        norms = list(differences(norm_cases(device, [(3, 16), (5, 100), (2, 1040), (1, 1)])))
    row_norm_triton._launch.cache_clear()
    return {
        "norm": norms,
        "activation": list(differences(activation_cases(device, [(3, 16), (5, 1100), (1, 2048), (4, 7)]))),
        "rope": list(differences(rope_cases(device, ROPES))),
        "tokens": list(differences(token_cases(device, [(5, 2, 16), (3, 3, 100), (2, 1, 4200), (1, 4, 1)]))),
    }


def test_the_kernels_interpreted_agree_with_their_references() -> None:
    assert interpreted(what_differs) == {"norm": [], "activation": [], "rope": [], "tokens": []}


MATRICES = [(7, 100), (130, 4096), (8192, 4096), (300, 5120), (64, 11008), (1000, 8192)]
SHORT_ROWS = [(20_000, 80), (9000, 256), (6001, 500)]
"""More than there are programs."""

HEADS = [(2, 100, 32, 32, 128, 128), (2, 64, 64, 8, 128, 128), (2, 64, 32, 2, 128, 64), (2, 65, 32, 32, 80, 20)]
ON_A_GPU = {
    "tokens": (token_cases, [(1, 1, 1), (7, 3, 100), (4096, 2, 2048), (300, 6, 5120)]),
    # of one value a norm's gradient is what rounding leaves of a difference of equals, of two a layer norm's too
    "norm": (norm_cases, [(1, 5), *MATRICES, *SHORT_ROWS]),
    "activation": (activation_cases, [(1, 1), *MATRICES]),
    "rope": (rope_cases, [*ROPES, *HEADS, (1, 64, 128, 1, 192, 64)]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("part", ON_A_GPU)
def test_the_kernels_agree_with_their_references_every_time(part) -> None:
    torch.manual_seed(0)
    cases_of, sizes = ON_A_GPU[part]
    for _ in range(5):
        assert list(differences(cases_of(torch.device("cuda"), sizes))) == []


@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_is_that_of_torch_and_its_backward_what_autograd_derives(norm: str) -> None:
    kind = dict(NORMS[norm])
    torch.manual_seed(0)
    x, residual, dy, dh = (torch.randn(6, 40, dtype=torch.float64) + 0.5 for _ in range(4))
    weight, bias = torch.randn(2, 40, dtype=torch.float64)
    leaves = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]
    h, factors = x + residual, 1 + weight if kind.get("unit_offset") else weight
    if kind.get("centered"):
        y = F.layer_norm(h, (40,), factors, bias if kind.get("biased") else None, 1e-5)
    else:
        y = F.rms_norm(h, (40,), factors, 1e-5)
    dx, _, *of_parameters = torch.autograd.grad([y, h], leaves, [dy, dh], allow_unused=True)
    x, residual, weight, bias, dy, dh = (tensor.detach().float() for tensor in (*leaves, dy, dh))
    biased = kind.pop("biased", False)
    made = row_norm.row_norm(x, weight, 1e-5, residual, bias if biased else None, **kind)
    torch.testing.assert_close(made.y.double(), y.detach(), rtol=1e-5, atol=1e-5)
    gradients = row_norm.row_norm_backward(dy, made.h, weight, made.inverse_rms, dh, biased=biased, **kind)
    for found, right in zip(gradients[:3], (dx, *of_parameters), strict=True):
        assert (found is None) == (right is None)
        if right is not None:
            torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize("gated", [True, False])
def test_an_activation_is_that_of_torch_and_its_backward_what_autograd_derives(kind: str, gated: bool) -> None:
    torch.manual_seed(0)
    dy, *leaves = (3 * torch.randn(6, 40, dtype=torch.float64) for _ in range(2 + gated))
    leaves[0][0, :8] = torch.tensor([0.0, 20, -20, 100, -100, 1e4, -1e4, -5])
    leaves = [leaf.requires_grad_() for leaf in leaves]
    y = ACTIVATIONS[kind](leaves[0]) * (leaves[1] if gated else 1)
    expected = torch.cat(torch.autograd.grad(y, leaves, dy), 1)
    parts = [leaf.detach().float() for leaf in leaves]
    found = activation.activate(*parts, kind=kind).y.double()
    torch.testing.assert_close(found, y.detach(), rtol=1e-5, atol=1e-5)
    found, _, _ = activation.activate_backward(dy.float(), *parts, kind=kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_weights_of_rows_multiply_an_activation_and_get_what_autograd_derives(gated: bool) -> None:
    torch.manual_seed(0)
    dy, *leaves = (torch.randn(6, 40, dtype=torch.float64) for _ in range(2 + gated))
    values = torch.randn(3, 2, dtype=torch.float64)
    choices = torch.tensor([2, -1, 0, 1, -1, 4], dtype=torch.int32)  # two have no row
    leaves, values = [leaf.requires_grad_() for leaf in leaves], values.requires_grad_()
    own = choices >= 0
    factors = torch.zeros(6, dtype=torch.float64).masked_scatter(own, values.flatten()[choices[own]])
    y = F.silu(leaves[0]) * (leaves[1] if gated else 1) * factors[:, None]
    *of_parts, dvalues = torch.autograd.grad(y, [*leaves, values], dy)
    parts = [leaf.detach().float() for leaf in leaves]
    weights = activation.RowWeights(values.detach().float(), choices)
    found = activation.activate(*parts, weights=weights).y
    assert not found[~own].any()
    torch.testing.assert_close(found.double(), y.detach(), rtol=1e-5, atol=1e-5)
    dx, _, dweights = activation.activate_backward(dy.float(), *parts, weights=weights)
    torch.testing.assert_close(dx.double(), torch.cat(of_parts, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweights.double(), dvalues, rtol=1e-5, atol=1e-5)


def test_the_references_of_sums_are_what_autograd_derives() -> None:
    torch.manual_seed(0)
    rows, weights, dy = (torch.randn(*shape, dtype=torch.float64) for shape in ((12, 40), (6, 2), (6, 40)))
    places = torch.randperm(12).view(6, 2)
    places[places >= 10] += 2  # choices that have no row
    leaves = [rows.requires_grad_(), weights.requires_grad_()]
    y = (rows[places.clamp(max=11)] * (weights * (places < 12)).unsqueeze(2)).sum(1)
    expected = torch.autograd.grad(y, leaves, dy)
    rows, weights = (leaf.detach().float() for leaf in leaves)
    torch.testing.assert_close(token_rows.sum_rows(rows, places, weights).double(), y.detach(), rtol=1e-5, atol=1e-5)
    (drows, dweights), (right, of_weights) = token_rows.sum_rows_backward(dy.float(), rows, places, weights), expected
    torch.testing.assert_close(drows[:10].double(), right[:10], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dweights.double(), of_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "glm4", "cohere"])
def test_rope_is_that_of_transformers_and_its_backward_what_autograd_derives(family: str) -> None:
    """Whole heads in halves; half a head, as neighbours; neighbours with angles laid out so."""
    apply = import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 8, 16)
    turned = 8 if family == "glm4" else 16
    angle = torch.randn(1, 5, turned // 2)
    angle = angle.repeat_interleave(2, -1) if family == "cohere" else angle.repeat(1, 1, 2)
    pairs = {"interleaved": family != "llama", "interleaved_angles": family == "cohere"}
    cos, sin = angle.cos(), angle.sin()
    q, k, v = (part.clone().requires_grad_() for part in qkv.split([4, 2, 2], 2))
    right = apply(q, k, cos, sin, unsqueeze_dim=2)
    rotated = qkv.clone()
    rope.rotate(rotated, cos, sin, 6, **pairs)
    torch.testing.assert_close(rotated, torch.cat([*right, v], 2).detach())
    gradients = [torch.randn_like(part) for part in (q, k, v)]
    expected = torch.autograd.grad([*right, v * 1], [q, k, v], gradients)
    dqkv, _ = rope.rotate_back(*gradients, cos, sin, **pairs)
    torch.testing.assert_close(dqkv, torch.cat(expected, 2))

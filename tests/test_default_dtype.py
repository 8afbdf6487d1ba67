"""What is made does not depend on `torch.set_default_dtype`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import fp8booster
from fp8booster import FP8Config, fp8_linear
from fp8booster.comm.automatic_scaling import GROWTH, AutomaticScaling
from fp8booster.kernels.group_codes import encode_roots

PACKAGE = Path(fp8booster.__file__).parent

FACTORIES = (
    *("Tensor", "arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full"),
    *("linspace", "logspace", "normal", "ones", "rand", "randn", "range", "scalar_tensor", "tensor", "zeros"),
)
"""Functions of torch that make a tensor of the default dtype where none is given, or of integers."""


def without_dtype(source: str) -> list[int]:
    """The lines that make a tensor and give it no dtype."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and (_makes_a_tensor(node) or _chooses_between_numbers(node))
    ]


def _makes_a_tensor(node: ast.Call) -> bool:
    return node.func.attr in FACTORIES and "dtype" not in [keyword.arg for keyword in node.keywords]


def _chooses_between_numbers(node: ast.Call) -> bool:
    """Whether it is `torch.where(condition, 1.0, 0.0)`."""
    return node.func.attr == "where" and len(node.args) == 3 and all(map(_is_number, node.args[1:]))


def _is_number(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand)
    named = isinstance(node, ast.Name) and node.id.isupper()  # a constant
    return named or isinstance(node, ast.Constant) or ast.unparse(node) in ("torch.inf", "torch.nan")


def test_every_tensor_that_is_made_has_a_dtype() -> None:
    found = {
        str(file.relative_to(PACKAGE)): lines
        for file in PACKAGE.rglob("*.py")
        if (lines := without_dtype(file.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ["torch.zeros(2)", "torch.tensor([0.5], device=device)", "torch.where(large, 2.0, -1.0)", "torch.where(a, 0.5, B)"],
)
def test_a_tensor_without_dtype_is_found(source: str) -> None:
    assert without_dtype(f"import torch\nx = f({source})") == [2]


@pytest.mark.parametrize(
    "source",
    ["torch.zeros(2, dtype=torch.float32)", "torch.where(a, b, 0.0)", "torch.nn.Linear(2, 2)", "x.new_zeros(2)"],
)
def test_a_tensor_of_a_given_dtype_is_none_without(source: str) -> None:
    assert without_dtype(source) == []


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_products_are_the_same(dtype: torch.dtype, granularity: str) -> None:
    config, generator = FP8Config(scaling=granularity), torch.Generator().manual_seed(0)
    x, w = (torch.randn(128, 128, generator=generator, dtype=torch.float32).bfloat16() for _ in range(2))

    def products() -> list[torch.Tensor]:
        made = [tensor.clone().requires_grad_() for tensor in (x, w)]
        y = fp8_linear(*made, config=config)
        y.backward(x)
        return [y.detach(), *(tensor.grad for tensor in made)]

    right = products()
    torch.set_default_dtype(dtype)
    try:
        found = products()
    finally:
        torch.set_default_dtype(torch.float32)
    for one, other in zip(right, found, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_codes_and_scales_have_their_dtypes(dtype: torch.dtype) -> None:
    groups = torch.tensor([[1.0, 2.0], [0.0, 0.0], [torch.inf, 1.0]], dtype=torch.float32)
    torch.set_default_dtype(dtype)
    try:
        codes, amaxes = encode_roots(groups)
        scaling = AutomaticScaling(4, groups.device)
        scaling._set_mu(scaling._next_mu(torch.tensor([0, 1000], dtype=torch.int64)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert codes.dtype is torch.int8
    assert amaxes.dtype is scaling.mu.dtype is torch.float32
    assert scaling.mu.item() == torch.tensor(GROWTH / 4, dtype=torch.float32).item()

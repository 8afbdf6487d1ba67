"""What is made does not depend on `torch.set_default_device`: memory of the host is pinned, and NumPy writes to it."""

from __future__ import annotations

import ast
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.optim import AdamW
from tests.test_default_dtype import FACTORIES, PACKAGE

MAKE = (*FACTORIES, "randint", "randperm")


def without_device(source: str) -> list[int]:
    """The lines that make a tensor and give it no device."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr in MAKE) == ("torch", True)
        and "device" not in [keyword.arg for keyword in node.keywords]
    ]


def test_every_tensor_that_is_made_has_a_device() -> None:
    found = {
        str(file.relative_to(PACKAGE)): lines
        for file in PACKAGE.rglob("*.py")
        if (lines := without_device(file.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_a_tensor_without_device_is_found() -> None:
    source = (
        "import torch\nx = f(torch.zeros(2, dtype=d))\ny = torch.zeros(2, device=d), torch.cat([x]), x.new_zeros(2)"
    )
    assert without_device(source) == [2]


def trained(around: AbstractContextManager) -> list[torch.Tensor]:
    """The weights of a layer that trains a few steps with states of 8 bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.Linear(32, 16, dtype=torch.bfloat16))
    convert_to_fp8(model, FP8Config(always=True))
    optimizer, x = AdamW(model.parameters(), lr=1e-2), torch.randn(16, 64).bfloat16()
    with around:
        for _ in range(3):
            model(x).float().square().sum().backward()
            optimizer.step(div_scale=2.0)
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_steps_are_the_same() -> None:
    for one, other in zip(trained(nullcontext()), trained(torch.device("meta")), strict=True):
        assert torch.equal(one, other)

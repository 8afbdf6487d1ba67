"""Weights that lie in memory of their own each, cast as one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import WEIGHT, RealTime
from fp8booster.tensor import QuantizedMatrix

COLUMNS = 32


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(rows, COLUMNS, generator=generator).bfloat16()) for rows in (48, 5, 64)]


def assert_same(one: QuantizedMatrix, other: QuantizedMatrix) -> None:
    for found, expected in zip(one, other, strict=True):
        assert (found is None) == (expected is None)
        assert found is None or torch.equal(found.float(), expected.float())


@dataclass(frozen=True)
class Own(RealTime):
    """Halves a weight's scale."""

    def cast(self, role: str, matrix: torch.Tensor, dtype: torch.dtype, **options: Any) -> QuantizedMatrix:
        if role == WEIGHT:
            options["amax"] = 2 * matrix.float().abs().amax()
        return super().cast(role, matrix, dtype, **options)


@pytest.mark.parametrize("scaling", ["tensorwise", "amax", "rowwise", "blockwise", "delayed", Own()])
def test_a_stack_is_cast_as_in_one_piece(scaling: Any) -> None:
    config = FP8Config(scaling=scaling, emulate=True)
    stack, whole = weights(), torch.cat([weight.detach() for weight in weights()])
    found, expected = Casts.of_layer(config), Casts.of_layer(config)
    for _ in range(2):  # the second by what the first has noted, where a strategy keeps something
        made = found.quantize_stack(stack, transposed=True)
        assert_same(made, expected.quantize_weight(whole, transposed=True))
        assert not made.data.requires_grad


def test_without_a_transpose_and_under_autocast_a_stack_has_the_same_bytes() -> None:
    casts = Casts.of_layer(FP8Config(emulate=True))
    both = casts.quantize_stack(weights(), transposed=True)
    with torch.autocast("cpu", dtype=torch.float16):
        plain = casts.quantize_stack(weights(), transposed=False)
    assert not plain.transpose.numel()
    assert torch.equal(plain.data.view(torch.uint8), both.data.view(torch.uint8))


def test_who_observes_a_stack_sees_it_in_one_piece() -> None:
    casts, seen = Casts.of_layer(FP8Config(emulate=True)), []
    expected = casts.quantize_stack(weights(), transposed=True)
    casts.observers.append(lambda *operand: seen.append(operand))
    made = casts.quantize_stack(weights(), transposed=True)
    assert_same(made, expected)
    ((role, matrix, quantized),) = seen
    assert role == WEIGHT
    assert torch.equal(matrix, torch.cat(weights()))
    assert quantized is made

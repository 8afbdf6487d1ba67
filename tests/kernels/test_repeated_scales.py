"""Scales of both operands written out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from fp8booster.kernels.repeated_scales import repeat_scales
from tests.kernels.interpreted import all_of, interpreted

CASES = [((), 1, (), 48), ((), 5000, (3,), 96), ((4, 2), 1600, (1, 1), 16), ((7,), 7, (2,), 4096)]
"""The shapes of both scales, and the sizes wanted."""


def given(case: tuple, device: str = "cpu") -> tuple:
    shape_a, size_a, shape_b, size_b = case
    generator = torch.Generator().manual_seed(size_a)
    a, b = (torch.rand(shape, generator=generator).to(device) for shape in (shape_a, shape_b))
    return a, size_a, b, size_b


@pytest.mark.parametrize("case", CASES)
def test_each_scale_is_repeated_in_a_row(case: tuple) -> None:
    a, size_a, b, size_b = given(case)
    for found, scale, size in zip(repeat_scales(a, size_a, b, size_b), (a, b), (size_a, size_b), strict=True):
        values = scale.flatten().tolist()
        assert found.is_contiguous()
        assert found.tolist() == [value for value in values for _ in range(size // len(values))]


def test_the_scales_of_one_are_multiplied_by_a_factor() -> None:
    arguments = given(CASES[2])
    (a, b), (times, same) = repeat_scales(*arguments), repeat_scales(*arguments, 1 / 3)
    assert torch.equal(times, a * (1 / 3))
    assert torch.equal(same, b)


def differences(device: str) -> Iterator[str]:
    from fp8booster.kernels.repeated_scales_triton import repeat_scales_triton

    for case, factor in itertools.product(CASES, (1.0, 1 / 3)):
        arguments = *given(case, device), factor
        pairs = zip(repeat_scales_triton(*arguments), repeat_scales.reference(*arguments), strict=True)
        if not all(torch.equal(found, expected) for found, expected in pairs):
            yield f"{case}, times {factor}"


def test_the_kernel_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert list(differences("cuda")) == []

"""Scales of both operands written out."""

from __future__ import annotations

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


def differences(device: str) -> Iterator[str]:
    from fp8booster.kernels.repeated_scales_triton import repeat_scales_triton

    for case in CASES:
        pairs = zip(
            repeat_scales_triton(*given(case, device)), repeat_scales.reference(*given(case, device)), strict=True
        )
        if not all(torch.equal(found, expected) for found, expected in pairs):
            yield str(case)


def test_the_kernel_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert list(differences("cuda")) == []

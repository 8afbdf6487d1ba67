"""Norms of many tensors are those of torch, whatever the tensors, and the same each time."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster.kernels.norms import norms_of

SHAPES = ((), 0, 1, 300, (33, 130), 70_000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_those_of_each_tensor(dtype, device) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in SHAPES]
    tensors.append(torch.randn(40, 30, device=device).to(dtype).t())
    found = norms_of(tensors)
    assert all(norm.dtype is torch.float32 and norm.shape == () for norm in found)
    for tensor, norm in zip(tensors, found, strict=True):
        assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-5)


def test_what_is_not_finite_stays_in_its_own_norm(device) -> None:
    tensors = [torch.ones(5000, device=device) for _ in range(3)]
    tensors[0][4999], tensors[1][7] = math.nan, -math.inf
    nan, infinite, finite = norms_of(tensors)
    assert nan.isnan()
    assert infinite == math.inf
    assert float(finite) == pytest.approx(math.sqrt(5000))


def test_no_tensors_have_no_norms() -> None:
    assert norms_of([]).shape == (0,)


@pytest.mark.gpu
def test_large_tensors_have_the_same_norm_each_time() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(count, device="cuda").to(dtype) for count in (13_000_001, 4096 * 528, 5)]
        first = norms_of(tensors)
        for tensor, norm in zip(tensors, first, strict=True):
            assert float(norm) == pytest.approx(float(tensor.double().norm()), rel=1e-5)
        for _ in range(5):
            assert all(map(torch.equal, norms_of(tensors), first))


@pytest.mark.gpu
def test_a_norm_has_the_same_bits_whatever_others_are_found_with_it() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2_000_003 + 5 * place, device="cuda").bfloat16() for place in range(40)]
    alone = torch.cat([norms_of([tensor]) for tensor in tensors])
    for at_once in (2, 7, 16, 40):
        found = torch.cat([norms_of(tensors[first : first + at_once]) for first in range(0, 40, at_once)])
        assert torch.equal(found, alone), at_once

"""Rows of FP8 tokens, in both layouts: the kernel writes the bytes of the reference, and zeros where rows pad."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fp8booster.formats import E4M3
from fp8booster.kernels.token_rows import gather_rows
from tests.kernels.interpreted import all_of, interpreted

SHAPES = [(1, 1, 16, 16), (5, 1, 16, 48), (5, 3, 48, 80), (30, 2, 80, 528), (40, 4, 160, 144)]
"""(tokens, choices of each, rows, features): rows are a multiple of 16, and as many as the choices or more."""


def given(shape: tuple[int, ...], device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens of bytes that differ in a row and a column, and the choices of rows in any order, with padding."""
    tokens, of_token, rows, features = shape
    generator = torch.Generator().manual_seed(rows)
    values = torch.arange(tokens * features).remainder(251).to(torch.uint8).view(tokens, features)
    choices = torch.randperm(rows, generator=generator).to(torch.int32)
    choices = choices.masked_fill(choices >= tokens * of_token, -1)
    return values.to(device).view(E4M3), choices.to(device), of_token


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_its_token_in_both_layouts_and_padding_is_zeros(shape: tuple[int, ...]) -> None:
    tokens, choices, of_token = given(shape)
    rows = [
        torch.zeros(shape[3], dtype=torch.uint8) if choice < 0 else tokens[choice // of_token].view(torch.uint8)
        for choice in choices.tolist()
    ]
    for plain, transposed in product((True, False), repeat=2):
        data, transpose = gather_rows(tokens, choices, of_token, plain=plain, transposed=transposed)
        assert (data.numel() > 0, transpose.numel() > 0) == (plain, transposed)
        assert data.is_contiguous()
        assert transpose.is_contiguous()
        for matrix in ([data] if plain else []) + ([transpose.t()] if transposed else []):
            assert torch.equal(matrix.view(torch.uint8), torch.stack(rows))


def differences(device: str) -> Iterator[str]:
    """Where the kernel writes other bytes than the reference."""
    from fp8booster.kernels.token_rows_triton import gather_rows_triton

    for shape, plain, transposed in product(SHAPES, (True, False), (True, False)):
        if not (plain or transposed):
            continue
        found, expected = (
            function(*given(shape, device), plain=plain, transposed=transposed)
            for function in (gather_rows_triton, gather_rows.reference)
        )
        for one, other in zip(found, expected, strict=True):
            if one.shape != other.shape or not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                yield f"{shape} plain={plain} transposed={transposed}"


def test_the_kernel_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert list(differences("cuda")) == []

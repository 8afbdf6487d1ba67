from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fp8booster.kernels.transpose import gathered_layouts, order
from tests.kernels.interpreted import interpreted

SHAPES = [(2, 1, 16, 48), (2, 1, 5, 16), (2, 3, 8, 80), (3, 2, 70, 144), (4, 2, 33, 16)]
"""(ranks, groups, rows of a piece, columns): in order already, padded, to be put in order, more than one tile."""


def gathered(shape: tuple[int, ...], device: torch.device | str = "cpu") -> torch.Tensor:
    """Bytes as they come, all different in a row and a column."""
    ranks, outer, rows, columns = shape
    values = torch.arange(ranks * outer * rows * columns, device=device) % 251
    return values.to(torch.uint8).view(ranks, outer * rows, columns)


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_columns_are_in_the_order_of_the_whole(shape) -> None:
    _, outer, rows, columns = shape
    parts = gathered(shape)
    whole = torch.cat([part.view(outer, rows, columns) for part in parts], 1).reshape(-1, columns)
    for plain, transposed in product((True, False), repeat=2):
        data, transpose = gathered_layouts(parts, outer, plain=plain, transposed=transposed)
        assert (data.numel() > 0, transpose.numel() > 0) == (plain, transposed)
        for matrix in ([data] if plain else []) + ([transpose.t()] if transposed else []):
            assert matrix.shape[0] % 16 == 0
            assert torch.equal(matrix[: len(whole)], whole)
            assert not matrix[len(whole) :].any()
        assert data.is_contiguous()
        assert transpose.is_contiguous()


def test_what_has_the_order_already_is_not_copied() -> None:
    parts = gathered(SHAPES[0])
    data, _ = gathered_layouts(parts, 1, plain=True, transposed=True)
    assert data.data_ptr() == parts.data_ptr()


def differences(device: str) -> Iterator[str]:
    """Where the kernel writes other bytes than the reference."""
    from fp8booster.kernels.transpose_triton import order_triton

    for shape, plain, transposed in product(SHAPES, (True, False), (True, False)):
        ranks, outer, rows, columns = shape
        padded, results = -(-ranks * outer * rows // 16) * 16, []
        for function in (order.reference, order_triton):
            outputs = [
                torch.full(size, 0x55, dtype=torch.uint8, device=device)
                for size in ((padded, columns), (columns, padded))
            ]
            wanted = (outputs[0] if plain else None, outputs[1] if transposed else None)
            function(gathered(shape, device), outer, *wanted)
            results.append(outputs)
        if not all(map(torch.equal, *results)):
            yield f"{shape} plain={plain} transposed={transposed}"


def test_the_kernel_in_triton_s_interpreter() -> None:
    assert interpreted(_interpreted) == []


def _interpreted() -> list[str]:
    return list(differences("cpu"))


def test_it_reads_and_writes_whole_vectors_on_hopper() -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fp8booster.kernels.transpose_triton import order_kernel

    names = order_kernel.arg_names
    constants = {"PLAIN": True, "TRANSPOSED": True, "TILE": 64}
    pointers = ("gathered", "data", "transpose")
    signature = {name: "constexpr" if name in constants else "*u8" if name in pointers else "i32" for name in names}
    aligned = (*pointers, "padded", "columns")
    source = ASTSource(
        order_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options={"num_warps": 4}).asm["ptx"]
    assert re.findall(r"\b(?:ld|st)\.global\.b(?:8|16)\b", ptx) == []


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    assert list(differences("cuda")) == []

"""The kernels of many casts compile for Hopper, which takes no GPU, and move whole vectors."""

from __future__ import annotations

import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fp8booster import formats  # noqa: E402
from fp8booster.kernels import many_cast_triton as kernels  # noqa: E402

TYPES = {
    "table": "*i64",
    "matrix_of_tile": "*i32",
    "amax": "*i32",
    "inverse_scales": "*fp32",
    "inverse_scale_stride": "i32",
}
TILE = {"TILE_ROWS": kernels.TILE_ROWS, "TILE_COLUMNS": kernels.TILE_COLUMNS}


def ptx_of(kernel, constants: dict[str, object], like: str) -> str:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else (TYPES | {"like": like})[name] for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


@pytest.mark.parametrize("like", ["*bf16", "*fp16", "*fp32"])
def test_the_amax_reads_whole_vectors_and_raises_once_a_tile(like) -> None:
    ptx = ptx_of(kernels.many_amax_kernel, TILE, like)
    assert "ld.global.v4.b32" in ptx
    assert re.findall(r"\bld\.global\.b(?:8|16)\b", ptx) == []
    assert len(re.findall(r"\batom\.global\S*\.max\.", ptx)) == 1


@pytest.mark.parametrize("like", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_the_cast_reads_and_writes_whole_vectors_by_the_instruction(dtype, like) -> None:
    constants = {"E4M3": dtype is formats.E4M3, "LIMIT": formats.MAX[dtype], "POWER_OF_TWO": False, **TILE}
    ptx = ptx_of(kernels.many_cast_kernel, constants, like)
    assert "ld.global.v4.b32" in ptx
    assert "cvt.rn.satfinite" in ptx
    assert re.findall(r"\b(?:ld|st)\.global\.b(?:8|16)\b", ptx) == []

"""The kernel that looks at a cast compiles for Hopper and reads whole vectors."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fp8booster import formats
from fp8booster.kernels import cast_statistics_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

SIZES = ("columns", "count", "tiles", "row_stride", "data_row_stride", "scale_row_stride", "scale_column_stride")
TYPES = {"data": "*u8", "inverse_scale": "*fp32", "parts": "*fp64", **dict.fromkeys(SIZES, "i32")}
CONSTANTS = {"GROUP": 128, "FIELDS": 8, "BLOCK": 2048, "column_stride": 1, "data_column_stride": 1}


@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("matrix", ["*bf16", "*fp32"])
def test_whole_vectors_are_read(matrix, dtype) -> None:
    kernel, codes = cast_statistics_triton.cast_statistics_kernel, cast_statistics_triton._CODES[dtype]
    constants = {**CONSTANTS, **codes, "LIMIT": formats.MAX[dtype]}
    ptx = ptx_of(kernel, {**TYPES, "matrix": matrix}, constants, unspecialized=("tiles",), num_warps=8)
    assert "ld.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []

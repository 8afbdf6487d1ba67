"""The kernel of the blockwise cast compiles for Hopper to what it says, and moves whole vectors."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from fp8booster import formats
from fp8booster.kernels import blockwise_cast_triton
from fp8booster.kernels.alignment import BLOCK
from fp8booster.kernels.cast_triton import rounding
from tests.kernels.compiled import narrow_accesses, ptx_of, sass_of

KERNEL = blockwise_cast_triton.blockwise_cast_kernel
TYPES = {
    **dict.fromkeys(("x", "plain", "transpose"), "*bf16"),
    **dict.fromkeys(("inverse_scale", "transpose_inverse_scale"), "*fp32"),
    **dict.fromkeys(("rows", "columns", "row_stride", "out_rows", "out_columns"), "i32"),
    **dict.fromkeys(("scale_columns", "transpose_scale_columns", "column_tiles"), "i32"),
}
CONSTANTS = {"column_stride": 1, "BLOCK": BLOCK}
layouts = pytest.mark.parametrize(("plain", "transposed"), [(True, False), (False, True), (True, True)])


def types_of(dtype) -> dict[str, str]:
    name = "*fp8e4nv" if dtype is formats.E4M3 else "*fp8e5"
    return {**TYPES, "plain": name, "transpose": name}


@layouts
@pytest.mark.parametrize("square", [False, True])
def test_values_outside_of_a_single_row_are_zeros(square, plain, transposed) -> None:
    # they are constants, and a conversion of constants once kept half of what lay in the register of the stack (R1)
    constants = {**CONSTANTS, **rounding(formats.E4M3, True), "SQUARE": square, "PLAIN": plain}
    constants |= {"TRANSPOSED": transposed, "rows": 1, "column_tiles": 1}
    sass = sass_of(KERNEL, types_of(formats.E4M3), constants, num_warps=8)
    conversions = re.findall(r"F2FP\.SATFINITE\.E4M3\S* (.*?);", sass)
    assert conversions
    assert [each for each in conversions if re.search(r", R1\b", each)] == []


@layouts
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_whole_vectors_are_moved(dtype, plain, transposed) -> None:
    constants = {**CONSTANTS, **rounding(dtype, True), "SQUARE": False, "PLAIN": plain, "TRANSPOSED": transposed}
    ptx = ptx_of(KERNEL, types_of(dtype), constants, unspecialized=("column_tiles",), num_warps=8)
    assert narrow_accesses(ptx) == []

"""The kernels of delayed casts compile for Hopper, which takes no GPU."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from fp8booster import formats
from fp8booster.kernels import cast_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

POINTERS = dict.fromkeys(("partials", "inverse_scale", "amaxes", "history"), "*fp32")
SIZES = ("partial_count", "rows", "columns", "row_stride", "out_rows", "out_columns", "column_tiles", "count", "steps")
TYPES = {**POINTERS, **dict.fromkeys(SIZES, "i32"), "plain": "*fp8e4nv", "transpose": "*fp8e4nv", "factor": "fp32"}


@pytest.mark.parametrize("like", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("finds_amaxes", [False, True])
def test_a_cast_that_finds_amaxes_stores_one_a_program_and_reads_once(like, finds_amaxes) -> None:
    constants = {
        "column_stride": 1,
        "E4M3": True,
        "LIMIT": formats.MAX[formats.E4M3],
        "POWER_OF_TWO": False,
        "PLAIN": True,
        "TRANSPOSED": True,
        "FINDS_AMAXES": finds_amaxes,
        "PARTIALS_BLOCK": 16,
        "TILE_ROWS": 64,
        "TILE_COLUMNS": 64,
    }
    ptx = ptx_of(cast_triton.cast_kernel, TYPES | {"x": like}, constants)
    assert "cvt.rn.satfinite" in ptx
    assert narrow_accesses(ptx) == []
    # the inverse scale, and the amax
    assert len(re.findall(r"\bst\.global\.b32\b", ptx)) == 1 + finds_amaxes


@pytest.mark.parametrize("new_step", [False, True])
def test_all_of_a_history_are_read_before_one_is_written(new_step) -> None:
    constants = {"NEW_STEP": new_step, "BLOCK": 4096, "STEPS_BLOCK": 1024}
    ptx = ptx_of(cast_triton.note_kernel, TYPES, constants)
    first_store, last_barrier = ptx.index("st.global"), ptx.rindex("bar.sync")
    assert last_barrier < first_store
    assert ptx.rindex("ld.global") < last_barrier

"""The kernel of norms compiles for Hopper and reads whole vectors."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fp8booster.kernels import norms_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

TYPES = {"partials": "*fp32", "count": "i32", "tiles": "i32"}


@pytest.mark.parametrize("values", ["*bf16", "*fp32"])
def test_whole_vectors_are_read(values: str) -> None:
    kernel, types = norms_triton.squares_kernel, {**TYPES, "values": values}
    ptx = ptx_of(kernel, types, {"BLOCK": 4096}, unspecialized=("tiles",), num_warps=8)
    assert "ld.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []

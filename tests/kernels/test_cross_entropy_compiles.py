"""The kernels of cross entropy compile for Hopper, which takes no GPU, and move whole vectors."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from fp8booster.kernels import cross_entropy_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

TYPES = {
    "targets": "*i64",
    "losses": "*fp32",
    "totals": "*fp32",
    "factor": "*fp32",
    "partials": "*fp32",
    "rows": "i32",
    "columns": "i32",
    "row_stride": "i32",
    "ignore_index": "i32",
    "count": "i64",
    "blocks": "i32",
}
WIDTHS = {"*bf16": 8, "*fp16": 8, "*fp32": 4}


def cross_entropy_ptx(
    logits: str, *, tail: bool, gradient: bool = True, loss: bool = True, cap: float = 0.0, unspecialized: tuple = ()
) -> str:
    width = WIDTHS[logits]
    lanes = cross_entropy_triton.BLOCK // width
    constants = {
        "SCALE": 1.0,
        "CAP": cap,
        "LOSS": loss,
        "GRADIENT": gradient,
        "TAIL": tail,
        "LANES": lanes,
        "WIDTH": width,
    }
    return ptx_of(
        cross_entropy_triton.cross_entropy_kernel,
        TYPES | {"logits": logits},
        constants,
        unspecialized=("rows", "ignore_index", *unspecialized),
        num_warps=min(16, lanes // 32),
    )


@pytest.mark.parametrize("logits", WIDTHS)
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_logits_move_in_whole_vectors_where_rows_begin_at_one(cap: float, tail: bool, logits: str) -> None:
    ptx = cross_entropy_ptx(logits, tail=tail, cap=cap)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    alone = 0 if logits == "*fp32" else 1  # the target's logit
    assert len(narrow_accesses(ptx)) == alone
    assert ".local" not in ptx  # registers hold all


def test_whole_blocks_move_in_whole_vectors_for_any_number_of_columns() -> None:
    ptx = cross_entropy_ptx("*bf16", tail=True, unspecialized=("columns",))
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx


@pytest.mark.parametrize("loss", [True, False])
def test_threads_do_not_meet_while_they_read_a_row(loss: bool) -> None:
    ptx = cross_entropy_ptx("*bf16", tail=False, gradient=False, loss=loss)
    whole_vectors = [match.start() for match in re.finditer(r"ld\.global\.v4\.b32", ptx)]
    assert len(whole_vectors) == 1
    loop = ptx[ptx.rindex("$L__BB", 0, whole_vectors[0]) : ptx.index("bra", whole_vectors[0])]
    assert loop.count("ex2.approx") == 9  # one for each logit, and one that brings the sum so far to the new largest
    assert "bar.sync" not in loop
    assert "shfl" not in loop


@pytest.mark.parametrize("logits", WIDTHS)
@pytest.mark.parametrize("tail", [False, True])
def test_the_gradient_alone_moves_in_whole_vectors_and_threads_meet_at_the_end(tail: bool, logits: str) -> None:
    ptx = ptx_of(
        cross_entropy_triton.cross_entropy_gradient_kernel,
        TYPES | {"logits": logits},
        {"TAIL": tail, "BLOCK": cross_entropy_triton._GRADIENT_BLOCK},
        unspecialized=("rows", "ignore_index"),
        num_warps=8,
    )
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []
    assert ".local" not in ptx
    assert "bar.sync" not in ptx[: ptx.rindex("ex2.approx")]


@pytest.mark.parametrize("x", WIDTHS)
def test_the_multiplication_moves_whole_vectors(x: str) -> None:
    ptx = ptx_of(
        cross_entropy_triton.multiply_kernel,
        TYPES | {"x": x},
        {"BLOCK": cross_entropy_triton._MULTIPLY_BLOCK},
        unspecialized=("blocks",),
        num_warps=8,
    )
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []

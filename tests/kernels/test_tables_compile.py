"""Kernels that find their tensors in a table compile for Hopper, and move whole vectors where these are aligned."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from fp8booster.kernels import adamw_8bit_triton, adamw_triton, norms_triton, shard_cast_triton, stack_cast_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

TABLE = {"entries": "*i64", "owners": "*i32"}
RATES = dict.fromkeys(("beta1", "rest1", "beta2", "rest2", "eps"), "fp32")
ROUNDING = {"E4M3": True, "LIMIT": 448.0, "POWER_OF_TWO": False}

KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, object], int]] = {
    f"squares {values}": (
        norms_triton.squares_kernel,
        {"values": values, "partials": "*fp32"},
        {"MOST": 528, "BLOCK": 4096},
        8,
    )
    for values in ("*bf16", "*fp32")
} | {
    "adamw": (
        adamw_triton.adamw_kernel,
        {"values": "*fp32", "gradients": "*bf16", "exp_avg": "*fp32", "exp_avg_sq": "*fp32", "rows": "*fp32"}
        | {"divisor": "*fp32", **RATES},
        {"DIVIDES": True, "DECOUPLED": True, "BLOCK": 1024},
        4,
    ),
    **{
        f"adamw_8bit {values}": (
            adamw_8bit_triton.adamw_8bit_kernel,
            {"values": values, "lows": lows, "gradients": "*bf16", "firsts": "*i8", "amaxes": "*fp32"}
            | {"seconds": "*u8", "ranges": "*i32", "rows": "*fp32", "skipped": "*i32", **RATES},
            {"DECOUPLED": True, "BLOCKS": 1, "BLOCK": 256},
            1,
        )
        for values, lows in (("*bf16", "*i16"), ("*fp32", "*fp32"))
    },
    "cast_shards": (
        shard_cast_triton.cast_shards_kernel,
        {"shard": "*fp32", "out": "*fp8e4nv", "inverse_scale": "*fp32", "amaxes": "*fp32"},
        {**ROUNDING, "BLOCK": 4096},
        8,
    ),
    "unpack": (
        shard_cast_triton.unpack_kernel,
        {"matrix": "*fp8e4nv", "transpose": "*fp8e4nv", "weight": "*bf16", "inverse_scale": "*fp32"},
        {"E4M3": True, "TRANSPOSED": True, "VALUES": True, "TILE": 64},
        4,
    ),
    "amaxes of a stack": (
        stack_cast_triton.stack_amaxes_kernel,
        {"values": "*bf16", "partials": "*fp32"},
        {"MOST": 9, "BLOCK": 4096},
        8,
    ),
    **{
        f"stack_cast {tile}": (
            stack_cast_triton.stack_cast_kernel,
            {"matrix": "*bf16", "amax": "*fp32", "plain": "*fp8e4nv", "transpose": "*fp8e4nv"}
            | {"inverse_scale": "*fp32", "columns": "i32", "stacked": "i32", "out_columns": "i32"},
            {**ROUNDING, "PLAIN": True, "TRANSPOSED": transposed, "TILE_ROWS": tile[0], "TILE_COLUMNS": tile[1]},
            4,
        )
        for tile, transposed in (((64, 128), True), ((64, 64), True), ((32, 256), False))
    },
}


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_whole_vectors_are_moved_where_tensors_are_aligned(name: str, aligned: bool) -> None:
    kernel, types, constants, warps = KERNELS[name]
    ptx = ptx_of(kernel, TABLE | types, {**constants, "ALIGNED": aligned}, unspecialized=tuple(RATES), num_warps=warps)
    assert ("ld.global.v4.b32" in ptx) == aligned
    if aligned:
        assert narrow_accesses(ptx) == []


def test_norms_are_roots_that_are_rounded_right_of_sums_in_one_order() -> None:
    types = {"partials": "*fp32", "norms": "*fp32"}
    ptx = ptx_of(norms_triton.roots_kernel, types, {"MOST": 528, "BLOCK": 1024}, num_warps=4)
    assert "sqrt.rn.f32" in ptx
    assert "atom" not in ptx

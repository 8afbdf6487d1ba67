"""The kernels of FP8 messages compile for Hopper, which takes no GPU, and move whole vectors where they should."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

pytest.importorskip("triton")

from fp8booster import formats
from fp8booster.kernels import block_cast_triton as kernels
from fp8booster.kernels import message_rows_triton as rows_kernels
from tests.kernels import compiled
from tests.kernels.compiled import narrow_accesses

TYPES = {
    "partials": "*fp32",
    "partial_count": "i32",
    "message": "*u8",
    "total": "i64",
    "part": "i32",
    "first": "i32",
    "end": "i32",
    "tiles": "i32",
    "count": "i32",
    "size": "i32",
    "factor": "fp32",
    "places": "*i64",
    "rows": "i32",
}
UNSPECIALIZED = {"rows", "partial_count", "first", "end", "tiles", "factor", "partials"}
FORMAT = {"E4M3": True, "LIMIT": formats.MAX[formats.E4M3], "POWER_OF_TWO": False}
BLOCKS = {"TENSORWISE": False, "BLOCK": 256, "TILE_BLOCKS": 16}
ROWS = {**BLOCKS, "TILE_BLOCKS": 8}  # of 2048 values
ONE_SCALE = {"TENSORWISE": True, "BLOCK": 1024, "TILE_BLOCKS": 4}


def ptx_of(kernel, constants: dict[str, object], x: str, *, aligned: bool = True) -> str:
    """PTX; arguments as in `stages_of`."""
    return stages_of(kernel, constants, x, aligned=aligned)["ptx"]


def stages_of(kernel, constants: dict[str, object], x: str, *, aligned: bool = True) -> Mapping[str, str]:
    """Compile with every count a multiple of 16 or of nothing; pieces always begin at one."""
    types = TYPES | {"x": x, "y": x, "dy": x, "out": "*u8" if constants.get("ENCODE") else x}
    unspecialized = UNSPECIALIZED | (set() if aligned else {"total", "part", "count"})
    options = {"num_warps": kernels.WARPS, "enable_fp_fusion": False}
    return compiled.stages_of(kernel, types, constants, unspecialized=unspecialized, **options)


@pytest.mark.parametrize("x", ["*bf16", "*fp16", "*fp32"])
@pytest.mark.parametrize("scales", [BLOCKS, ROWS, ONE_SCALE], ids=["blocks", "rows", "one scale"])
def test_encode_and_decode_move_whole_vectors(scales, x) -> None:
    given = {**FORMAT, **scales, "PARTIALS_BLOCK": 1024 if scales["TENSORWISE"] else 1}
    for kernel in (kernels.encode_kernel, kernels.decode_kernel):
        ptx = ptx_of(kernel, given, x)
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert narrow_accesses(ptx) == []


@pytest.mark.parametrize("encode", [False, True])
@pytest.mark.parametrize("pieces", [2, 8])
def test_the_sum_moves_whole_vectors_and_rounds_each_product(pieces, encode) -> None:
    given = {**FORMAT, **BLOCKS, "PIECES": pieces, "ENCODE": encode}
    ptx = ptx_of(kernels.sum_kernel, given, "*bf16")
    assert "ld.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []
    assert "fma.rn.f32" not in ptx  # the reference rounds the product before it adds


@pytest.mark.parametrize("x", ["*bf16", "*fp16", "*fp32"])
def test_sums_of_rows_of_a_message_move_whole_vectors(x: str) -> None:
    ptx = ptx_of(rows_kernels.sum_message_kernel, {**FORMAT, **ROWS, "OF_TOKEN": 2}, x)
    assert "ld.global.v4.b32" in ptx or "ld.global.v2.b32" in ptx
    assert "st.global.v4.b32" in ptx or "st.global.v2.b32" in ptx
    assert narrow_accesses(ptx) == []
    assert "fma.rn.f32" not in ptx


def test_sizes_that_are_multiples_of_nothing_compile() -> None:
    for scales in (BLOCKS, ONE_SCALE):
        given = {**FORMAT, **scales, "PARTIALS_BLOCK": 1024}
        ptx_of(kernels.encode_kernel, given, "*bf16", aligned=False)
        ptx_of(kernels.decode_kernel, given, "*bf16", aligned=False)
        sums = {**given, "PIECES": 3, "ENCODE": False}
        ptx = ptx_of(kernels.sum_kernel, sums, "*bf16", aligned=False)
        assert "ld.global.b8" not in ptx  # messages are padded, so that they are read whole


@pytest.mark.parametrize("scales", [BLOCKS, ONE_SCALE], ids=["blocks", "one scale"])
def test_counts_are_rounded_up_in_64_bits(scales) -> None:
    """From 2^31 - 1024 values on a piece's padded count does not fit in 32."""
    given = {**FORMAT, **scales, "PARTIALS_BLOCK": 1024, "PIECES": 2}
    runs = [(kernels.encode_kernel, {}), (kernels.decode_kernel, {})]
    runs += [(kernels.sum_kernel, {"ENCODE": encode}) for encode in (False, not scales["TENSORWISE"])]
    for kernel, more in runs:
        ttir = stages_of(kernel, given | more, "*bf16")["ttir"]
        uses = re.findall(r"= (arith\.\w+) .*%count\b", ttir)
        assert set(uses) == {"arith.extsi"}, kernel.fn.__name__


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_each_format_is_rounded_by_its_instruction(dtype) -> None:
    form = {"E4M3": dtype is formats.E4M3, "LIMIT": formats.MAX[dtype], "POWER_OF_TWO": False}
    ptx = ptx_of(kernels.encode_kernel, {**form, **BLOCKS, "PARTIALS_BLOCK": 1}, "*bf16")
    found = set(re.findall(r"cvt\.\S*\.(e\dm\dx2)\.f32", ptx))
    assert found == {"e4m3x2" if dtype is formats.E4M3 else "e5m2x2"}

"""The kernels of a decoder layer's pointwise parts compile for Hopper and move whole vectors at LLaMA's sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

pytest.importorskip("triton")

from fp8booster.kernels import activation_triton, rope_triton, row_norm_triton, token_rows_triton
from tests.kernels.compiled import narrow_accesses, stages_of

FLOATS = ("inverse_rms", "partials", "weights", "dweights", "dbiases", "inverse_scale")
PLAIN = {"BIAS": False, "CENTERED": False, "UNIT_OFFSET": False}
LAYER_NORM = {"BIAS": True, "CENTERED": True, "UNIT_OFFSET": False, "ENCODE": False, "DECODE": False}
ENCODED = {"EPS": 1e-5, "RESIDUAL": True, "ENCODE": True, "BLOCK": 4096, **PLAIN}
TILE = {"KIND": "silu", "GATED": True, "WEIGHTED": False, "TILE_ROWS": 2, "TILE_COLUMNS": 1024}
WEIGHTED = TILE | {"WEIGHTED": True, "ENCODE": False, "DECODE": False}
OF_CODES = TILE | {"ENCODE": False, "DECODE": True}
CAST = {"E4M3": True, "LIMIT": 448.0, "POWER_OF_TWO": False, "PARTIALS_BLOCK": 2048}
TRANSPOSED = {"TILE_ROWS": 64, "TILE_COLUMNS": 128, "UNIT_OFFSET": False, "DECODE": False, **CAST}

PAIRS = {"INTERLEAVED": False, "INTERLEAVED_ANGLES": False}
ROPE = {"PARTIAL": False, **PAIRS, "GROUPED": False, "LAST": False, "HALF": 64, "HEADS": 32}


class Types(dict):
    """Sums and maxima are FP32; what else a kernel reads or writes is BF16; sizes and strides are numbers."""

    def __missing__(self, name: str) -> str:
        if name == "places":
            return "*i64"
        if name == "choices":
            return "*i32"
        if name in ("source", "plain", "transpose"):
            return "*fp8e4nv"
        if name.endswith("codes"):
            return "*i8"
        if name.endswith("amaxes"):
            return "*bf16"
        tensor = (
            name in FLOATS
            or len(name) <= 2
            or name in ("residual", "weight", "bias", "out", "qkv", "cos", "sin", "dqkv")
        )
        return ("*fp32" if name in FLOATS else "*bf16") if tensor else "i32"


CASES = {
    "norm": (row_norm_triton.row_norm_kernel, ENCODED | {"ENCODE": False}, 8),
    "norm that encodes": (row_norm_triton.row_norm_kernel, ENCODED, 8),
    "norm of 5120": (
        row_norm_triton.row_norm_kernel,
        ENCODED | {"RESIDUAL": False, "ENCODE": False, "BLOCK": 8192},
        16,
    ),
    "layer norm": (row_norm_triton.row_norm_kernel, ENCODED | LAYER_NORM, 8),
    "layer norm's backward": (row_norm_triton.row_norm_backward_kernel, ENCODED | LAYER_NORM, 8),
    "norm's backward": (row_norm_triton.row_norm_backward_kernel, ENCODED | {"DECODE": False}, 8),
    "SwiGLU": (activation_triton.activation_kernel, TILE | {"BACKWARD": False, "ENCODE": False, "DECODE": False}, 4),
    "weighted SwiGLU": (activation_triton.activation_kernel, WEIGHTED | {"BACKWARD": False}, 4),
    "weighted SwiGLU's backward": (activation_triton.activation_kernel, WEIGHTED | {"BACKWARD": True}, 4),
    "SwiGLU that encodes": (
        activation_triton.activation_kernel,
        TILE | {"BACKWARD": False, "ENCODE": True, "DECODE": False},
        4,
    ),
    "SwiGLU of codes": (activation_triton.activation_kernel, OF_CODES | {"BACKWARD": False}, 4),
    "SwiGLU's backward of codes": (activation_triton.activation_kernel, OF_CODES | {"BACKWARD": True}, 4),
    "norm's backward of codes": (row_norm_triton.row_norm_backward_kernel, ENCODED | {"DECODE": True}, 8),
    "SwiGLU's backward": (
        activation_triton.activation_kernel,
        TILE | {"BACKWARD": True, "ENCODE": False, "DECODE": False},
        4,
    ),
    "SwiGLU's transpose": (activation_triton.activation_transposed_kernel, TILE | TRANSPOSED, 8),
    "SwiGLU's transpose, of codes": (
        activation_triton.activation_transposed_kernel,
        TILE | TRANSPOSED | {"DECODE": True},
        8,
    ),
    "norm's transpose": (row_norm_triton.row_norm_transposed_kernel, TRANSPOSED, 8),
    "norm's transpose, of codes": (row_norm_triton.row_norm_transposed_kernel, TRANSPOSED | {"DECODE": True}, 8),
    "GELU by tanh": (
        activation_triton.activation_kernel,
        TILE | {"KIND": "gelu_tanh", "BACKWARD": False, "ENCODE": False, "DECODE": False},
        4,
    ),
    "GELU's backward, not gated": (
        activation_triton.activation_kernel,
        TILE | {"KIND": "gelu", "GATED": False, "BACKWARD": True, "ENCODE": False, "DECODE": False},
        4,
    ),
    "rope": (rope_triton.rotate_kernel, ROPE, 4),
    "rope of neighbours": (rope_triton.rotate_kernel, ROPE | {"INTERLEAVED": True}, 4),
    "rope of neighbours, backward": (rope_triton.rotate_back_kernel, ROPE | {"INTERLEAVED": True, "PARTIAL": True}, 4),
    "rope of groups": (rope_triton.rotate_kernel, ROPE | {"GROUPED": True}, 4),
    "rope of groups, backward": (rope_triton.rotate_back_kernel, ROPE | {"GROUPED": True, "PARTIAL": True}, 4),
    "rope of the last places": (rope_triton.rotate_kernel, ROPE | {"INTERLEAVED": True, "LAST": True}, 4),
    "rope of the last places, backward": (rope_triton.rotate_back_kernel, ROPE | {"LAST": True, "PARTIAL": True}, 4),
    "rows of tokens": (
        token_rows_triton.gather_rows_kernel,
        {"PLAIN": True, "TRANSPOSED": False, "TILE_ROWS": 16, "TILE_PAIRS": 256},
        4,
    ),
    "rows of tokens and their transpose": (
        token_rows_triton.gather_rows_kernel,
        {"PLAIN": True, "TRANSPOSED": True, "TILE_ROWS": 128, "TILE_PAIRS": 64},
        8,
    ),
    "sums of tokens' rows": (
        token_rows_triton.sum_rows_kernel,
        {"WEIGHTED": False, "OF_TOKEN": 2, "ROUNDED": False, "BLOCK": 2048},
        4,
    ),
    "weighted sums of tokens' rows": (
        token_rows_triton.sum_rows_kernel,
        {"WEIGHTED": True, "OF_TOKEN": 2, "ROUNDED": False, "BLOCK": 2048},
        4,
    ),
    "sums' backward": (token_rows_triton.sum_rows_backward_kernel, {"OF_TOKEN": 2, "ROUNDED": False, "BLOCK": 2048}, 4),
    "rope's backward": (rope_triton.rotate_back_kernel, ROPE, 4),
}


@pytest.mark.parametrize("case", [case for case in CASES if "code" not in case])
def test_whole_vectors_are_moved(case: str) -> None:
    ptx = compiled(case)["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []


@pytest.mark.parametrize("case", [case for case in CASES if "code" in case])
def test_eight_codes_are_moved_at_once(case: str) -> None:
    ptx = compiled(case)["ptx"]
    moved = "ld" if "of codes" in case else "st"
    assert f"{moved}.global.v2.b32" in ptx
    assert {access.split(".")[-1] for access in narrow_accesses(ptx)} == {"b16"}  # amaxes, one for 128 values


@pytest.mark.parametrize("case", [case for case in CASES if "transpose" in case])
def test_tiles_are_transposed_by_whole_matrices(case: str) -> None:
    """Not byte by byte through shared memory, as where a value of FP8 takes part in what is transposed."""
    ptx = compiled(case)["ptx"]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in ptx
    assert "shared.b8" not in ptx


def compiled(case: str) -> Mapping[str, str]:
    kernel, constants, warps = CASES[case]
    codes = ("x", "up", "h") if constants.get("DECODE") else ()
    return stages_of(kernel, Types(dict.fromkeys(codes, "*i8")), constants, num_warps=warps)


def test_a_norm_that_encodes_sums_in_the_order_of_one_that_does_not() -> None:
    layouts = []
    for case in ("norm", "norm that encodes"):
        made = compiled(case)["ttgir"]
        (layout,) = set(re.findall(r"tensor<4096xf32, #(\w+)>\) -> f32", made))
        layouts.append(re.search(rf"#{layout} = (.*)", made).group(1))
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("block", [128, 256, 512, 1024])
@pytest.mark.parametrize(
    "kind", ["norm", "norm that encodes", "layer norm", "norm's backward", "layer norm's backward"]
)
def test_short_rows_move_in_vectors_and_a_warp_alone_waits_for_no_others(kind: str, block: int) -> None:
    kernel, constants, _ = CASES[kind]
    warps = row_norm_triton.warps_for(block)
    ptx = stages_of(kernel, Types(), constants | {"BLOCK": block}, num_warps=warps)["ptx"]
    vector = "v2" if block == 128 else "v4"
    assert f"ld.global.{vector}.b32" in ptx
    # a row's amaxes of codes, in BF16
    assert len(narrow_accesses(ptx)) == (kind == "norm that encodes")
    assert ("bar.sync" in ptx) == (warps > 1)

"""The kernels of a decoder layer's pointwise parts compile for Hopper and move whole vectors at LLaMA's sizes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from fp8booster.kernels import rms_norm_triton, rope_triton, swiglu_triton, token_rows_triton
from tests.kernels.compiled import narrow_accesses, ptx_of

FLOATS = ("inverse_rms", "partials", "weights", "dweights")


class Types(dict):
    """Sums and maxima are FP32; what else a kernel reads or writes is BF16; sizes and strides are numbers."""

    def __missing__(self, name: str) -> str:
        if name == "places":
            return "*i64"
        tensor = (
            name in FLOATS
            or len(name) <= 2
            or name in ("residual", "weight", "gate", "out", "qkv", "cos", "sin", "dqkv")
        )
        return ("*fp32" if name in FLOATS else "*bf16") if tensor else "i32"


CASES = {
    "norm": (rms_norm_triton.rms_norm_kernel, {"EPS": 1e-5, "RESIDUAL": True, "BLOCK": 4096}, 8),
    "norm of 5120": (rms_norm_triton.rms_norm_kernel, {"EPS": 1e-5, "RESIDUAL": False, "BLOCK": 8192}, 16),
    "norm's backward": (rms_norm_triton.rms_norm_backward_kernel, {"RESIDUAL": True, "BLOCK": 4096}, 8),
    "SwiGLU": (swiglu_triton.swiglu_kernel, {"BACKWARD": False, "TILE_ROWS": 2, "TILE_COLUMNS": 1024}, 4),
    "SwiGLU's backward": (swiglu_triton.swiglu_kernel, {"BACKWARD": True, "TILE_ROWS": 2, "TILE_COLUMNS": 1024}, 4),
    "rope": (rope_triton.rotate_kernel, {"HALF": 64, "HEADS": 32}, 4),
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
    "rope's backward": (rope_triton.rotate_back_kernel, {"HALF": 64, "HEADS": 32}, 4),
}


@pytest.mark.parametrize("case", CASES)
def test_whole_vectors_are_moved(case: str) -> None:
    kernel, constants, warps = CASES[case]
    ptx = ptx_of(kernel, Types(), constants, num_warps=warps)
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []

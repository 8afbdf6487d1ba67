from __future__ import annotations

import torch

from benchmarks.outliers import FACTORS, RECIPES, record_of


def test_finer_scales_keep_what_one_loses() -> None:
    found = {
        (recipe, factor): record_of(recipe, factor, 256, 128, 256, torch.device("cpu"))
        for recipe in RECIPES
        for factor in FACTORS
    }
    for factor in FACTORS:
        for name in ("fprop", "wgrad", "weight"):
            assert found["tensorwise, smooth SwiGLU", factor][name] > 25
    assert found["tensorwise", 200]["fprop"] < 25
    assert found["tensorwise", 2000]["fprop"] < 10
    assert found["blockwise", 2000]["wgrad"] > 30

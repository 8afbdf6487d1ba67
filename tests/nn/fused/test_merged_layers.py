"""Layers of one input as one product: what keeps them apart, and what the report says of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster import FP8Linear, report
from fp8booster.nn.fused.merged_layers import MergedLayers, MergedLinears

BF16 = torch.bfloat16


@pytest.mark.parametrize("with_bias", [0, 1])
@pytest.mark.parametrize(("kind", "merged"), [(FP8Linear, MergedLayers), (nn.Linear, MergedLinears)])
def test_layers_of_which_only_some_have_a_bias_run_one_by_one(kind, merged, with_bias) -> None:
    layers = [kind(64, 32, bias=number == with_bias, dtype=BF16) for number in range(2)]
    together = merged(layers)
    assert together(torch.randn(16, 64, dtype=BF16)) is None
    assert together.why_not_merged == "only some of the layers have a bias"


def test_each_layer_reports_the_numbers_of_tokens_of_the_one_product() -> None:
    layers = nn.ModuleList(FP8Linear(64, 32, dtype=BF16) for _ in range(2))
    MergedLayers(list(layers))(torch.randn(40, 64, dtype=BF16))
    assert [row.notes for row in report(layers).fp8] == ["padded: tokens 40->48"] * 2

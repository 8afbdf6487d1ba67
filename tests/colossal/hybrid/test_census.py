"""In every mode every product of every eligible layer runs through `torch._scaled_mm`, and no other product does."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import report
from fp8booster.nn.convert import linear_layers, product_features
from fp8booster.nn.linear.layer import FP8Layer
from tests.colossal.hybrid.runs import LENGTH, MODES, SEQUENCES, HybridRun, batches, fp8, parts, start
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_census import Census, Sizes

PASSES = 3
"""fprop, dgrad, wgrad."""


def census(run: HybridRun) -> Census:
    """What one step multiplies on this rank."""
    group = run.booster.plugin.dp_group
    ((batch,),) = batches(0, 1, dist.get_world_size(group), dist.get_rank(group))
    with Census() as counted:
        run.step(batch)
    return counted


def operations(products: Counter[Sizes]) -> int:
    """Multiplications and additions, however the products were cut into pieces."""
    return sum(rows * inner * columns * count for (rows, inner, columns), count in products.items())


def expected(layers: list[nn.Module], rows: int) -> int:
    """Operations of the three products of layers, or of this rank's shards of them, on so many tokens."""
    features = [product_features(layer) for layer in layers]
    return PASSES * rows * sum(inputs * outputs for inputs, outputs in features)


def assert_all_products_in_fp8(run: HybridRun) -> None:
    """All but the head's, which stays in 16 bits by default."""
    plugin = run.booster.plugin
    counted = census(run)
    rows = SEQUENCES * LENGTH // dist.get_world_size(plugin.dp_group) // plugin.sp_size
    layers = dict(linear_layers(run.model.unwrap()))
    heads = [layer for name, layer in layers.items() if name == "lm_head"]
    eligible = [layer for name, layer in layers.items() if name != "lm_head"]
    assert len(eligible) == 7 * max(2, parts(plugin)) // plugin.pp_size
    assert all(isinstance(layer, FP8Layer) for layer in eligible)
    assert operations(counted.fp8) == expected(eligible, rows), counted.fp8
    assert operations(counted.other) == expected(heads, rows), counted.other
    if not plugin.enable_sequence_parallelism:  # where Colossal-AI computes attention itself, by batched products
        assert set(counted.batched) <= {torch.float32}, counted.batched  # the angles of the rotary embedding
    assert [row.precision for row in report(run.model).rows].count("FP8") == len(eligible)


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_all_products_but_those_of_the_vocabulary_head_run_in_fp8(mode: str) -> None:
    assert_all_products_in_fp8(start(fp8(mode)))

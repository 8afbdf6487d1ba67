"""Gemini with fused decoder layers over 4 ranks: with tensor parallelism, and with replicas of its shards."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config, comm, report
from fp8booster.nn.fused.merged_layers import merged_layers
from tests.colossal.gemini.observations import census
from tests.colossal.gemini.runs import boost, config, fp8_chunks, layers, wire
from tests.colossal.gemini.test_tensor_parallel import CLOSE, LAYERS, RUNS, assert_of_the_head, learn
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_census import products
from tests.plugins.training import assert_close

SIZES = {"num_key_value_heads": 4, "vocab_size": 256}


@ranks(4)
@pytest.mark.parametrize("case", ["TP2", "TP2, sequence parallel", "TP2, extra DP2"])
def test_a_fused_sharded_model_learns_as_an_unfused_one(case: str) -> None:
    run, expected = (
        boost(wire(fp8_config=config(fused=fused), **RUNS[case]), tiny_llama(**SIZES)) for fused in (True, False)
    )
    assert_close(learn(expected, 2), learn(run, 2), CLOSE)
    assert "10 of them merged to 4 products" in report(run.model).summary()


@ranks(4)
def test_a_fused_model_runs_over_replicas_of_shards() -> None:
    curves = [learn(boost(wire(fp8_config=config(fused=fused), extra_dp_size=2))) for fused in (True, False)]
    assert_close(curves[1], curves[0], CLOSE)


@ranks(4)
def test_every_product_of_fused_tensor_parallel_layers_runs_in_fp8() -> None:
    run = boost(wire(tp_size=2, fp8_config=FP8Config(fused=True)))
    tokens = token_batch(dist.get_rank() // 2)
    comm.reset_statistics()
    counted = census(run, tokens)
    merged = merged_layers(run.model.unwrap())
    together = {layer for group in merged for layer in group.layers}
    shapes = [layer.weight.shape for _, layer in layers(run) if layer not in together]
    assert (len(together), len(shapes)) == (10, LAYERS - 10)
    shapes += [(sum(map(len, group.weights)), group.weights[0].shape[1]) for group in merged]
    expected = Counter()
    for outputs, inputs in shapes:
        shim = torch.nn.Linear(inputs, outputs, device="meta")
        expected += sum(products([shim], tokens.numel()).values(), Counter())
    assert counted.fp8 == expected
    assert_of_the_head(counted, tokens.numel())
    assert sum(len(chunk.tensors_info) for chunk in fp8_chunks(run)) == LAYERS

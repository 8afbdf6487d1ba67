"""Three ranks: sizes that do not divide by their number."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8booster import FP8Config, report
from tests.colossal.zero.runs import CLOSE, Layers, features, masters, step, wire
from tests.colossal.zero.test_weights import assert_is_cast_of_masters
from tests.distributed import ranks
from tests.plugins.training import STAGES, assert_close, assert_equal, assert_trains_equally, boost, native, train


@ranks(3)
def test_padded_shards_are_reduced_cast_and_gathered_whole() -> None:
    runs = [boost(wire(stage=stage)) for stage in STAGES]
    assert any(runs[0].optimizer.get_param_padding_map().values())
    assert_trains_equally(*runs)
    assert_equal(*map(masters, runs))
    # assert_trains_equally gathered the masters for its comparison
    train(runs[0], steps=1)
    assert_is_cast_of_masters(runs[0])
    assert_close(train(boost(native())), train(boost(wire())), CLOSE)


@ranks(3)
@pytest.mark.parametrize("in_one_pass", [True, False])
def test_padding_stays_out_of_the_scales_without_an_eps(in_one_pass: bool) -> None:
    """A step divides 0 by 0 there."""
    adam = partial(torch.optim.AdamW, eps=0.0, fused=in_one_pass, foreach=False)
    run = boost(wire(), Layers(64, 64, 64), optimizer=adam)
    assert any(run.optimizer.get_param_padding_map().values())
    for _ in range(2):
        step(run, features())
    assert (run.optimizer._why_by_itself is None) == in_one_pass
    assert_is_cast_of_masters(run)
    assert all(value.isfinite().all() for value in masters(run).values())


@ranks(3)
def test_merged_weights_with_padding_between_run_one_by_one_and_it_is_shown() -> None:
    run = boost(wire(fp8_config=FP8Config(fused=True, emulate=True)))
    said = "4 groups of layers not merged (the weights are not gathered into one matrix)"
    assert said in report(run.model).summary()
    assert_close(train(boost(wire(fp8_config=FP8Config(emulate=True)))), train(run), CLOSE)
    assert_is_cast_of_masters(run)

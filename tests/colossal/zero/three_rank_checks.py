"""Three ranks: sizes that do not divide by their number."""

from __future__ import annotations

from fp8booster import FP8Config, report
from tests.colossal.zero.runs import CLOSE, masters, wire
from tests.colossal.zero.weight_checks import assert_is_cast_of_masters
from tests.plugins.registry import check
from tests.plugins.training import (
    STAGES,
    assert_close,
    assert_equal,
    assert_trains_equally,
    boost,
    native,
    train,
)


@check
def padded_shards_are_reduced_cast_and_gathered_whole() -> None:
    runs = [boost(wire(stage=stage)) for stage in STAGES]
    assert any(runs[0].optimizer.get_param_padding_map().values())
    assert_trains_equally(*runs)
    assert_equal(*map(masters, runs))
    # assert_trains_equally gathered the masters for its comparison
    train(runs[0], steps=1)
    assert_is_cast_of_masters(runs[0])
    assert_close(train(boost(native())), train(boost(wire())), CLOSE)


@check
def merged_weights_with_padding_between_run_one_by_one_and_it_is_shown() -> None:
    run = boost(wire(fp8_config=FP8Config(fused=True, emulate=True)))
    said = "4 groups of layers not merged (the weights are not gathered one below the other)"
    assert said in report(run.model).summary()
    assert_close(train(boost(wire(fp8_config=FP8Config(emulate=True)))), train(run), CLOSE)
    assert_is_cast_of_masters(run)

"""`fuse` of a model that `LowLevelZeroPlugin` trains in BF16."""

from __future__ import annotations

import pytest

from fp8booster import fuse
from fp8booster.nn.fused import fused_summary
from fp8booster.nn.fused.merged_layers import merged_linears
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.training import STAGES, assert_close, assert_equal, boost, ours, train

WHOLE = "2 decoder layers fused, loss over chunks of logits"


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_model_fused_in_bf16_trains_as_the_model(stage: int) -> None:
    model = tiny_llama().bfloat16()
    assert fuse(model) == WHOLE
    fused, plain = boost(ours(stage=stage), model), boost(ours(stage=stage), tiny_llama().bfloat16())
    assert_close(train(plain, steps=4), train(fused, steps=4), 2e-3)
    assert fused_summary(fused.model.unwrap()) == WHOLE  # the steps wrote where the weights lie
    assert fused.parameters().keys() == plain.parameters().keys()


@ranks(2)
def test_a_model_fused_after_it_was_boosted_keeps_the_memory_that_zero_writes_to() -> None:
    early = tiny_llama().bfloat16()
    fuse(early)
    # buckets too small for any weight, so that each is gathered into the memory it had when it was boosted
    late, early = (
        boost(ours(stage=1, reduce_bucket_size_in_m=1e-3), model) for model in (tiny_llama().bfloat16(), early)
    )
    places = [parameter.data_ptr() for parameter in late.model.unwrap().parameters()]
    found = fuse(late.model.unwrap())
    assert found.count("others, such as an engine, hold the memory of their weights") == 1, found
    assert places == [parameter.data_ptr() for parameter in late.model.unwrap().parameters()]
    assert all(merged.why_not_merged is not None for merged in merged_linears(late.model))
    assert all(merged.why_not_merged is None for merged in merged_linears(early.model))
    before = late.parameters()
    assert_close(train(early, steps=4), train(late, steps=4), 2e-3)
    moved = [name for name, value in late.parameters().items() if not value.equal(before[name])]
    assert len(moved) == len(before)


@ranks(2)
def test_a_model_fused_in_bf16_goes_on_from_a_checkpoint_of_one_that_is_not() -> None:
    plain = boost(ours(stage=1), tiny_llama().bfloat16())
    train(plain, steps=2)
    model = tiny_llama(seed=1).bfloat16()
    fuse(model)
    model.load_state_dict(plain.model.unwrap().state_dict())
    assert fused_summary(model) == WHOLE
    assert_equal(plain.parameters(), dict(model.named_parameters()))

"""The forward of a sharded model's body."""

from __future__ import annotations

import inspect

import torch
from transformers import DynamicCache

from fp8booster.nn.fused.packing import CACHES
from tests.distributed import ranks
from tests.nn.fused.models import batch, build


@ranks(1)
def test_a_body_goes_on_from_a_cache_by_the_name_that_transformers_gives_it() -> None:
    from colossalai.shardformer.shard import ShardConfig

    from fp8booster.colossal.tensor.body import body_forward

    body = build("llama", torch.float32).eval().model
    taken = inspect.signature(type(body).forward).parameters
    name = next(each for each in CACHES if each in taken)
    config = ShardConfig(enable_tensor_parallelism=False)
    caches = DynamicCache(), DynamicCache()
    for ids in batch().split([20, 12], 1):
        found = body_forward(body, ids, **{name: caches[0]}, shard_config=config)
        right = body(ids, **{name: caches[1]}, use_cache=True)
        torch.testing.assert_close(found.last_hidden_state, right.last_hidden_state)
        assert found.past_key_values is caches[0]
    assert [each.get_seq_length() for each in caches] == [32, 32]

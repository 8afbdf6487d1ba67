"""Checkpoints cross between FSDP with FP8, native FSDP and DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    ShardingStrategy,
)

from tests.plugins import ddp_checks
from tests.plugins.fsdp_runs import BLOCKS, CLOSE, QUICK, STRATEGIES, WRAPPINGS, fp8, native, whole
from tests.plugins.registry import check_each, shared_folder
from tests.plugins.training import (
    assert_close,
    assert_equal,
    boost,
    rank_batches,
    train,
)

PLUGINS: dict[str, Callable[[], Any]] = {
    "fp8": functools.partial(fp8, auto_wrap_policy=BLOCKS),
    "native": functools.partial(native, auto_wrap_policy=BLOCKS),
    "fp8 DDP": functools.partial(ddp_checks.fp8, fp8_config=QUICK),
}


@check_each("fp8 to fp8", "fp8 to native", "native to fp8", "fp8 to fp8 DDP")
def fsdp_checkpoints_cross(crossing: str) -> None:
    source, _, target = crossing.partition(" to ")
    writer, reader = (boost(PLUGINS[name]()) for name in (source, target))
    train(writer, steps=2)
    writer.loss(rank_batches(1)[0])  # the root unit is whole now, its FP8 layers' weights rounded
    expected = whole(writer)
    for name, form in ddp_checks.FORMS.items():
        folder = shared_folder(f"fsdp {crossing}/{name}")
        model, optimizer = ddp_checks._save(writer, form, folder)
        if target == "fp8 DDP":
            reader.booster.load_model(reader.model, model)
            assert_equal(expected, reader.parameters())
            continue
        train(reader, steps=1)  # other weights
        reader.booster.load_model(reader.model, model)
        reader.booster.load_optimizer(reader.optimizer, optimizer)
        assert_equal(expected, whole(reader))
    if target != "fp8 DDP":
        losses = train(reader), train(writer)
        assert_close(*losses, CLOSE)
        if source == target:
            assert losses[0] == losses[1]


@check_each(*STRATEGIES[:2])
def fsdp_checkpoints_hold_exact_weights_after_a_forward(strategy: ShardingStrategy) -> None:
    for wrapping in ("one unit", "one unit in BF16"):
        run = boost(fp8(sharding_strategy=strategy, **WRAPPINGS[wrapping]))
        before = whole(run)
        loss = run.loss(rank_batches(1)[0])
        assert_equal(before, whole(run))
        run.booster.backward(loss, run.optimizer)
        with FullyShardedDataParallel.summon_full_params(run.model.module):
            pass  # writes back what it gathered
        assert_equal(before, whole(run))

"""Checkpoints cross between FSDP with FP8, native FSDP and DDP."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from tests.distributed import ranks, shared_folder
from tests.plugins import test_torch_ddp
from tests.plugins.fsdp_runs import BLOCKS, CLOSE, QUICK, STRATEGIES, WRAPPINGS, fp8, native, whole
from tests.plugins.training import assert_close, assert_equal, boost, rank_batches, train

PLUGINS: dict[str, Callable[[], Any]] = {
    "fp8": functools.partial(fp8, auto_wrap_policy=BLOCKS),
    "native": functools.partial(native, auto_wrap_policy=BLOCKS),
    "fp8 DDP": functools.partial(test_torch_ddp.fp8, fp8_config=QUICK),
}


@ranks(2)
@pytest.mark.parametrize("crossing", ["fp8 to fp8", "fp8 to native", "native to fp8", "fp8 to fp8 DDP"])
def test_fsdp_checkpoints_cross(crossing: str) -> None:
    source, _, target = crossing.partition(" to ")
    writer, reader = (boost(PLUGINS[name]()) for name in (source, target))
    train(writer, steps=2)
    writer.loss(rank_batches(1)[0])  # the root unit is whole now, its FP8 layers' weights rounded
    expected = whole(writer)
    for name, form in test_torch_ddp.FORMS.items():
        folder = shared_folder(f"fsdp {crossing}/{name}")
        model, optimizer = test_torch_ddp._save(writer, form, folder)
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


@ranks(2)
@pytest.mark.parametrize("strategy", [*STRATEGIES[:2]], ids=str)
def test_fsdp_checkpoints_hold_exact_weights_after_a_forward(strategy: ShardingStrategy) -> None:
    for wrapping in ("one unit", "one unit in BF16"):
        run = boost(fp8(sharding_strategy=strategy, **WRAPPINGS[wrapping]))
        before = whole(run)
        loss = run.loss(rank_batches(1)[0])
        assert_equal(before, whole(run))
        run.booster.backward(loss, run.optimizer)
        with FullyShardedDataParallel.summon_full_params(run.model.module):
            pass  # writes back what it gathered
        assert_equal(before, whole(run))


def _in_groups(trained: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW with a rate of its own for each of two groups."""
    return torch.optim.AdamW([{"params": trained[::2]}, {"params": trained[1::2], "lr": lr / 10}], lr=lr)


@ranks(2)
@pytest.mark.parametrize("plugin", ["fp8", "native"])
def test_fsdp_trains_and_saves_parameter_groups(plugin: str) -> None:
    """As DDP does, where nothing is sharded; a rate that went to the wrong group would show."""
    writer, reader = (boost(PLUGINS[plugin](), optimizer=_in_groups) for _ in range(2))
    expected = train(boost(PLUGINS["fp8 DDP"](), optimizer=_in_groups))
    schedule = torch.optim.lr_scheduler.LambdaLR(writer.optimizer.unwrap(), [lambda step: 1.0, lambda step: 1.0])
    assert_close(expected, train(writer), CLOSE, gradients=False)  # FSDP holds shards
    schedule.step()
    rates = [1e-2, 1e-3]
    assert [group["lr"] for group in writer.optimizer.param_groups] == rates
    folder = shared_folder(f"fsdp groups {plugin}")
    model, optimizer = test_torch_ddp._save(writer, test_torch_ddp.FORMS["shards"], folder)
    train(reader, steps=1)
    reader.booster.load_model(reader.model, model)
    reader.booster.load_optimizer(reader.optimizer, optimizer)
    assert_equal(whole(writer), whole(reader))
    assert [group["lr"] for group in reader.optimizer.param_groups] == rates
    # moments are not compared: on the CPU PyTorch 2.13 gathers all states of such parameters into one buffer


def _of_layers(trained: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """AdamW of the layers' parameters, not of those of embedding, last norm and head."""
    return torch.optim.AdamW(trained[1:-2], lr=lr)


@ranks(2)
@pytest.mark.parametrize("plugin", ["fp8", "native"])
def test_fsdp_trains_and_saves_what_the_optimizer_was_given(plugin: str) -> None:
    writer, reader = (boost(PLUGINS[plugin](), optimizer=_of_layers) for _ in range(2))
    before = whole(writer)
    expected = train(boost(PLUGINS["fp8 DDP"](), optimizer=_of_layers))
    assert_close(expected, train(writer), CLOSE, gradients=False)  # FSDP holds shards
    after = whole(writer)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if "layers." in name
    }
    folder = shared_folder(f"fsdp layers {plugin}")
    model, optimizer = test_torch_ddp._save(writer, test_torch_ddp.FORMS["shards"], folder)
    train(reader, steps=1)
    reader.booster.load_model(reader.model, model)
    reader.booster.load_optimizer(reader.optimizer, optimizer)
    assert_equal(after, whole(reader))

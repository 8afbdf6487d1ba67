"""What a script does that ZeRO cannot train by is told, and what it may do is done."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster

from fp8booster import FP8Config
from fp8booster.comm import Encoding
from tests.colossal.zero.runs import Layers, features, masters, step, wire
from tests.distributed import ranks
from tests.plugins.training import STAGES, assert_equal, boost


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("automatic", [False, True])
def test_gradients_of_different_layers_are_not_added_up(stage: int, automatic: bool) -> None:
    messages = Encoding(automatic_scaling=automatic)
    run = boost(wire(stage=stage, fp8_config=FP8Config(fused=False, messages=messages)), Layers(64, 64, 64, 64))
    step(run, features())
    run.model.unwrap().dropped = {1 + dist.get_rank()}  # as many values on both
    with pytest.raises(ValueError, match=r"layers\.2\.weight"):
        step(run, features())


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("megabytes", [12, 0.02])
def test_a_step_needs_gradients_that_were_reduced(stage: int, megabytes: float) -> None:
    """With the smaller buckets some are reduced on the way."""
    run = boost(wire(stage=stage, reduce_bucket_size_in_m=megabytes), Layers(64, 64, 64))
    before = masters(run)
    run.model(features()).backward()
    with pytest.raises(
        RuntimeError, match=r"wait to be reduced over the ranks; call booster\.backward\(loss, optimizer\)"
    ):
        run.optimizer.step()
    assert_equal(before, masters(run))
    run.optimizer.zero_grad()
    step(run, features())
    after = masters(run)
    assert not any(torch.equal(before[name], after[name]) for name in before)


@ranks(2)
def test_a_step_needs_a_micro_batch_outside_of_no_sync() -> None:
    run = boost(wire(stage=1), Layers(64, 64, 64))
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(run.model(features()), run.optimizer)
    with pytest.raises(RuntimeError, match="outside of no_sync"):
        run.optimizer.step()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_model_forgets_gradients_as_the_optimizer_does(stage: int) -> None:
    runs = [boost(wire(stage=stage), Layers(64, 64, 64)) for _ in range(2)]
    for run, forget in zip(runs, (runs[0].optimizer.zero_grad, runs[1].model.zero_grad), strict=True):
        for _ in range(3):
            run.booster.backward(run.model(features()), run.optimizer)
            run.optimizer.step()
            forget()
    assert_equal(*map(masters, runs))


@ranks(2)
def test_what_is_unfrozen_too_late_is_told_once() -> None:
    model = Layers(64, 64, 64)
    model.layers[1].requires_grad_(False)
    booster = Booster(plugin=wire())
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    network = model.unwrap()
    with mock.patch.object(optimizer._logger, "warning") as warning:
        for _ in range(3):
            booster.backward(model(features()), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            network.layers[1].requires_grad_(True)
    (told,) = [call.args[0] for call in warning.call_args_list if "unfreeze" in call.args[0]]
    assert told.startswith("layers.1.weight, layers.1.bias got gradients and stay as they are")


@ranks(2)
def test_states_of_a_parameter_without_a_gradient_are_saved_in_shards(tmp_path: Path) -> None:
    run = boost(wire(), Layers(64, 64, 64, 64))
    run.model.unwrap().dropped = {1}
    step(run, features())
    run.booster.save_optimizer(run.optimizer, str(tmp_path / "optimizer"), shard=True)
    dist.barrier()  # the first rank writes, and all read
    again = boost(wire(), Layers(64, 64, 64, 64))
    again.booster.load_optimizer(again.optimizer, str(tmp_path / "optimizer"))
    saved, loaded = (each.optimizer.optim.state_dict()["state"] for each in (run, again))
    assert {number for number, states in loaded.items() if states} == set(saved)
    for number, states in saved.items():
        assert_equal(states, loaded[number])

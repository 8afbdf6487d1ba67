"""The optimizer's step with FP8 on the wire: the norm that clips, Adam in one pass, checks before it, and groups."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8booster.comm.transport import agree_on_amax
from fp8booster.nn import sharding
from fp8booster.optim import HybridAdam, one_pass
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, batch, features, masters, own_gradients, step, wire
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_native import FP16
from tests.plugins.training import (
    STAGES,
    Boosted,
    assert_close,
    assert_equal,
    assert_trains_equally,
    boost,
    native,
    train,
)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_that_clips_is_near_that_of_16_bits(stage: int) -> None:
    norms = []
    for plugin in (native(stage=stage), wire(stage=stage)):
        run = boost(plugin)
        train(run, steps=1)
        norms.append(run.optimizer.get_grad_norm())
    assert_close(norms[:1], norms[1:], 0.02)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_divides_by_the_norm_over_all_ranks(stage: int) -> None:
    runs = [boost(wire(stage=stage, max_norm=limit)) for limit in (0.0, 1e-3, 1e3)]
    gradients = []
    for run in runs:

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            gradients.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

        run.optimizer.unwrap().register_step_pre_hook(keep)
        run.step(batch())
    whole, clipped, free = gradients
    norm = runs[0].optimizer.get_grad_norm()
    squares = sum(gradient.double().square().sum() for gradient in whole)
    dist.all_reduce(squares)
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-5)
    assert all(run.optimizer.get_grad_norm() == norm for run in runs)
    for before, after, unchanged in zip(whole, clipped, free, strict=True):
        torch.testing.assert_close(after, before * (1e-3 / (norm + 1e-6)), rtol=1e-5, atol=0)
        assert torch.equal(unchanged, before)


@ranks(2)
@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_step_no_gradient_takes_memory(stage: int, in_one_pass: bool) -> None:
    adam = partial(torch.optim.AdamW, fused=in_one_pass, foreach=False)
    run = boost(wire(stage=stage), Layers(64, 64, 64), optimizer=adam)
    step(run, features(), features())
    assert (run.optimizer._why_by_itself is None) == in_one_pass
    of_masters = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert len(of_masters) == 4
    assert all(each.grad is None for each in (*of_masters, *run.model.parameters()))
    assert not own_gradients(run)


@ranks(2)
@pytest.mark.parametrize("option", ["clipping", "fp16", "fp16 without clipping"])
def test_a_fused_optimizer_divides_the_gradients_itself(option: str) -> None:
    options = {"max_norm": 1e-3} if option == "clipping" else FP16
    if option == "fp16 without clipping":
        options = options | {"max_norm": 0.0}
    runs = [boost(wire(**options)) for _ in range(2)]
    fused = runs[1].optimizer.unwrap()
    for group in fused.param_groups:
        group["fused"] = True
    divisors, step_group = [], one_pass.step_group

    def observed(optimizer: Any, group: Any, masters: Any, gradients: Any, divisor: torch.Tensor) -> Any:
        divisors.append(float(divisor))
        return step_group(optimizer, group, masters, gradients, divisor)

    with mock.patch.object(one_pass, "step_group", observed):
        losses = [train(run) for run in runs]
    assert min(divisors) > 1
    assert all(group["params"] for group in fused.param_groups)
    assert_close(*losses, 1e-3)
    for name, before in masters(runs[0]).items():
        torch.testing.assert_close(masters(runs[1])[name], before, rtol=1e-3, atol=1e-4)


@ranks(2)
@pytest.mark.parametrize("case", ["AdamW", "offloaded", "Adam"])
def test_a_hybrid_adam_steps_in_one_pass_as_torchs_optimizer_does(case: str) -> None:
    options = {"max_norm": 1e-3, "cpu_offload": case == "offloaded"}
    kind = torch.optim.Adam if case == "Adam" else torch.optim.AdamW
    runs = [
        boost(wire(**options), optimizer=partial(kind, weight_decay=0.1, fused=True)),
        boost(wire(**options), optimizer=partial(HybridAdam, weight_decay=0.1, adamw_mode=case != "Adam")),
    ]
    assert_trains_equally(*runs)
    assert_equal(*map(masters, runs))
    assert [run.optimizer._why_by_itself for run in runs] == [None, None]


@ranks(2)
def test_a_step_in_one_pass_is_the_optimizers_own_and_tells_the_amax() -> None:
    """A hook makes the optimizer step by itself, and the amaxes are found by reading the masters again."""
    runs = [boost(wire(max_norm=1e-3)) for _ in range(2)]
    for run in runs:
        for group in run.optimizer.unwrap().param_groups:
            group["fused"] = True
    seen = []
    runs[1].optimizer.unwrap().register_step_pre_hook(
        lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    known = [], []
    for run, of_run in zip(runs, known, strict=True):

        def observed(shards: Any, group: Any, amaxes: Any, of_run: list[Any] = of_run) -> torch.Tensor:
            of_run.extend(amaxes)
            return agree_on_amax(shards, group, amaxes)

        with mock.patch.object(sharding, "agree_on_amax", observed):
            train(run)
    assert min(seen) > 0
    assert [run.optimizer._why_by_itself for run in runs] == [None, "hooks are called before or after its step"]
    for name, before in masters(runs[0]).items():
        # a divided gradient is rounded, one that is divided while it is read is not
        torch.testing.assert_close(masters(runs[1])[name], before, rtol=1e-4, atol=1e-5)
    assert known[0]
    assert all(amax is not None for amax in known[0])
    assert set(known[1]) == {None}


@ranks(2)
@pytest.mark.parametrize("option", ["one pass", "by itself"])
def test_a_check_before_the_update_knows_the_norm_and_loses_nothing(option: str) -> None:
    run = boost(wire(max_norm=1e-3))
    for group in run.optimizer.unwrap().param_groups:
        group["fused"] = option == "one pass"
    train(run, steps=1)
    norms = []
    run.optimizer.before_update = lambda: norms.append(run.optimizer.get_grad_norm())
    train(run, steps=1)
    assert (run.optimizer._why_by_itself is None) == (option == "one pass")
    before = {name: value.clone() for name, value in masters(run).items()}

    def refuse() -> None:
        raise ArithmeticError("enough")

    run.optimizer.before_update = refuse
    with pytest.raises(ArithmeticError, match="enough"):
        run.step(batch())
    for name, value in masters(run).items():
        assert torch.equal(value, before[name])
    assert norms == [pytest.approx(norms[0])]
    assert norms[0] > 1e-3


@ranks(2)
def test_a_check_that_ends_a_step_leaves_every_parameter_to_the_optimizer() -> None:
    run = boost(wire(), Layers(64, 64, 64, 64))
    step(run, features())
    expected = run.optimizer.state_dict()

    def refuse() -> None:
        raise ArithmeticError("enough")

    run.optimizer.before_update = refuse
    run.model.unwrap().dropped = {1}  # without a gradient it takes no part in a step
    with pytest.raises(ArithmeticError, match="enough"):
        step(run, features())
    found = run.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()


@ranks(2)
def test_each_parameter_group_keeps_its_own_rate() -> None:
    from colossalai.booster import Booster

    runs = []
    for plugin in (*(wire(stage=stage) for stage in STAGES), native()):
        model = tiny_llama()
        matrices = [value for value in model.parameters() if value.dim() > 1]
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 0.0}]
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups))
        runs.append(Boosted(booster, model.train(), optimizer))
    before = masters(runs[0])
    assert_trains_equally(*runs[:2])
    after = masters(runs[0])
    for run in runs:  # between steps the optimizer knows every master, as schedules and checkpoints read it
        for number, group in enumerate(run.optimizer.optim.param_groups):
            expected = run.optimizer._master_param_groups_of_current_rank[number]
            assert list(map(id, group["params"])) == list(map(id, expected)) != []
    for name in before:
        assert torch.equal(before[name], after[name]) == (before[name].dim() == 1), name
    losses = train(boost(wire()))
    assert_close(train(runs[2]), losses, 3 * CLOSE, gradients=False)  # another order of parameters

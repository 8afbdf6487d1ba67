"""The step of the optimizer without ZeRO: in one pass over memory where the optimizer inside can, else by itself."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch

from fp8booster.optim import AdamW, HybridAdam, one_pass
from tests.colossal.hybrid.runs import LOSS_SCALING, MODES, HybridRun, batches, fp8, learn, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks

CASES = {mode: MODES[mode] for mode in ("DP2", "TP2", "TP2 split_gather", "PP2 1f1b")} | {
    "DP2 FP16": {"precision": "fp16", "initial_scale": 2.0**8},
    "DP2 FP16 without clipping": {"precision": "fp16", "initial_scale": 2.0**8, "max_norm": 0.0},
}

TORCHS = partial(torch.optim.AdamW, weight_decay=0.1, fused=True)


def values_of(run: HybridRun) -> list[torch.Tensor]:
    """Weights, masters, and the states of the optimizer."""
    found = list(run.parameters().values())
    for group in run.optimizer.param_groups:
        for master in group["params"]:
            state = run.optimizer.unwrap().state[master]
            found += [master.detach().clone(), *(state[name].clone() for name in ("exp_avg", "exp_avg_sq", "step"))]
    return found


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_a_step_in_one_pass_is_the_optimizers_own(case: str) -> None:
    runs = [start(fp8(CASES[case], **{"max_norm": 1e-2} | CASES[case]), optimizer=TORCHS) for _ in range(2)]
    seen: list[int] = []
    runs[1].optimizer.unwrap().register_step_pre_hook(lambda *_: seen.append(1))
    losses = [learn(run, accumulate=2) for run in runs]
    assert [run.optimizer.why_by_itself() for run in runs] == [None, "hooks are called before or after its step"]
    assert len(seen) == len(losses[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    if "without clipping" not in case:
        assert runs[0].optimizer.get_grad_norm() == pytest.approx(runs[1].optimizer.get_grad_norm(), rel=1e-2)
    assert all(group["params"] for group in runs[0].optimizer.param_groups)
    for one, other in zip(*map(values_of, runs), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
    # weights are copies of their masters
    for master, working in runs[0].optimizer.master_to_working_map.items():
        assert torch.equal(working, master.to(working.dtype))


@ranks(2)
@pytest.mark.parametrize("inside", [HybridAdam, AdamW])
def test_other_adams_step_in_one_pass_too(inside: type) -> None:
    runs = [start(fp8("TP2"), optimizer=partial(each, weight_decay=0.1)) for each in (inside, TORCHS)]
    losses = [learn(run) for run in runs]
    assert [run.optimizer.why_by_itself() for run in runs] == [None, None]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_after_a_step_gradients_are_gone_and_schedules_have_counted_it(fused: bool) -> None:
    run = start(fp8("TP2"), optimizer=partial(torch.optim.AdamW, fused=fused, foreach=False))
    schedule = torch.optim.lr_scheduler.StepLR(run.optimizer.unwrap(), 1)
    calls = []
    right = one_pass.step_group
    with mock.patch.object(one_pass, "step_group", lambda *given: calls.append(1) or right(*given)):
        run.backward(batches(0, 1)[0][0])
        run.optimizer.step()
    assert len(calls) == fused
    assert all(working.grad is None for working in run.model.unwrap().parameters())
    assert not fused or all(master.grad is None for master in run.optimizer.master_to_working_map)
    schedule.step()  # which warns where no step came before
    # a parameter without a gradient stays, and has no states
    run.optimizer.zero_grad()
    before = run.parameters()
    run.optimizer.step()
    for name, value in run.parameters().items():
        assert torch.equal(value, before[name])


@ranks(2)
def test_parameters_whose_values_lie_apart_are_left_to_the_optimizer() -> None:
    losses = []
    for apart in (False, True):
        model = tiny_llama(**sizes())
        if apart:
            weight = model.model.embed_tokens.weight
            weight.data = weight.data.t().contiguous().t()
        run = start(fp8("DP2", max_norm=1.0), model=model, optimizer=TORCHS)
        losses.append(learn(run))
        assert run.optimizer.why_by_itself() == ("the values of a parameter lie apart" if apart else None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@ranks(2)
def test_an_overflow_is_skipped_with_all_as_it_was() -> None:
    run = start(fp8("DP2", **LOSS_SCALING), optimizer=TORCHS)
    before = run.parameters()
    run.backward(batches(0, 1, 2, torch.distributed.get_rank())[0][0])
    next(iter(run.optimizer.working_to_master_map)).grad.fill_(torch.inf)
    run.optimizer.step()
    for name, value in run.parameters().items():
        assert torch.equal(value, before[name])
    assert not run.optimizer.unwrap().state

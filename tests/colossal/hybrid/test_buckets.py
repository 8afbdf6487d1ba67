"""ZeRO's buckets in hybrid parallelism: each gradient is reduced once, in however many messages."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.colossal.hybrid.runs import MODES, batches, fp8, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks

ZERO = {
    "TP2 ZeRO 1": MODES["TP2 ZeRO 1"],
    "TP2 ZeRO 2": {"tp_size": 2, "zero_stage": 2},
    "SP2 all_to_all ZeRO 1": MODES["SP2 all_to_all ZeRO 1"],
    "PP2 1f1b ZeRO 1": MODES["PP2 1f1b ZeRO 1"],
    "DP2 ZeRO 2": MODES["DP2 ZeRO 2"],
}


@ranks(2)
@pytest.mark.parametrize("case", ZERO)
def test_a_bucket_for_each_gradient_gives_the_gradients_of_one_for_all(case: str) -> None:
    """DDP, in which Colossal-AI wraps a lone replica, gives parameters the gradients back that a bucket has taken."""
    norms = []
    for values in (None, 1):
        run = start(fp8(ZERO[case]), tiny_llama(**sizes()))
        if values is not None:
            run.optimizer._reduce_bucket_size = values
        for step in batches(0, 2, 2):
            run.step(step[0])
            norms.append(run.optimizer.get_grad_norm())
        assert not any(isinstance(module, DistributedDataParallel) for module in run.model.modules())
    assert norms[2:] == pytest.approx(norms[:2], rel=0.01)


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "SP2 all_to_all"])
def test_without_zero_ddp_reduces_what_several_ranks_have(mode: str) -> None:
    run = start(fp8(mode), tiny_llama(**sizes()))
    assert sum(isinstance(module, DistributedDataParallel) for module in run.model.modules()) == 1
    with run.booster.no_sync(run.model, run.optimizer):
        assert not run.model.module.require_backward_grad_sync


@ranks(2)
def test_a_lone_replica_without_zero_has_no_ddp() -> None:
    run = start(fp8("TP2"), tiny_llama(**sizes()))
    assert not any(isinstance(module, DistributedDataParallel) for module in run.model.modules())
    with run.booster.no_sync(run.model, run.optimizer):
        run.step(batches(0, 1, 1)[0][0])

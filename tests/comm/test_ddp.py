from __future__ import annotations

import copy
import math
import pickle

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from fp8booster import comm, formats
from fp8booster.comm import DDPState, Encoding
from fp8booster.comm.ddp import at_forward
from fp8booster.monitor.traffic import count_traffic
from tests.comm.training import batches, losses_of, small_model, worst_difference
from tests.distributed import run_ranks


def train_plain_and_in_fp8() -> dict[str, object]:
    model = small_model()
    other = copy.deepcopy(model)
    plain = losses_of(DistributedDataParallel(model))
    hooked = DistributedDataParallel(other)
    hooked.register_comm_hook(DDPState(min_bytes=4096), comm.ddp_hook)
    with count_traffic() as traffic:
        ours = losses_of(hooked)
    return {
        "plain": plain,
        "ours": ours,
        "parameters": [parameter.detach() for parameter in other.parameters()],
        "dtypes": {dtype for _, dtype in traffic.counts},
        "statistics": comm.statistics()["all_reduce"],
        "gradients": sum(parameter.numel() for parameter in model.parameters()),
    }


def test_the_loss_follows_that_of_plain_ddp_on_two_ranks() -> None:
    ranks = run_ranks(train_plain_and_in_fp8, 2)
    for rank in ranks:
        assert rank["ours"][-1] < 0.5 * rank["ours"][0]
        assert worst_difference(rank["ours"], rank["plain"]) < 0.02
        assert rank["ours"] != rank["plain"]
        assert rank["statistics"].ratio < 0.27
        assert torch.uint8 in rank["dtypes"]
    for one, other in zip(ranks[0]["parameters"], ranks[1]["parameters"], strict=True):
        assert torch.equal(one, other)


def average_a_gradient() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        model.weight.fill_(0.01)
    hooked = DistributedDataParallel(model)
    encoding = Encoding(format=formats.E5M2, block_size=64)
    hooked.register_comm_hook(DDPState(encoding=encoding, min_bytes=0), comm.ddp_hook)
    x = torch.randn(32, 64)
    hooked(x).square().sum().backward()
    exact = 2 * (x @ torch.full((64, 64), 0.01)).t() @ x
    dist.all_reduce(exact)
    return model.weight.grad, exact / dist.get_world_size()


def test_settings_reach_the_wire_and_the_result_is_the_mean() -> None:
    (gradient, exact), (other, _), _ = run_ranks(average_a_gradient, 3)
    assert torch.equal(gradient, other)
    noise = (gradient - exact).norm() / exact.norm()
    assert 2**-6 < noise < 2**-3  # E5M2 twice, not E4M3, not nothing
    assert math.isfinite(noise)


def gradients_beside_those_apart(factor: float) -> list[torch.Tensor]:
    """Of two parameters in one bucket, whose second's gradients are `factor` times larger and go apart."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    hooked = DistributedDataParallel(model)
    state = DDPState(
        encoding=Encoding(block_size=None), min_bytes=0, apart=lambda parameter: parameter is model[1].weight
    )
    hooked.register_comm_hook(state, comm.ddp_hook)
    gradients = [torch.randn(16, 16, generator=generator) for _ in model]
    hooked(torch.zeros(1, 16))  # begins the reduction; these gradients are given by hand
    first, second = ((layer.weight * each).sum() for layer, each in zip(model, gradients, strict=True))
    (first + factor * second).backward()
    return [layer.weight.grad for layer in model]


def small_and_large_ones_apart() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return gradients_beside_those_apart(1.0), gradients_beside_those_apart(2.0**20)


def test_gradients_that_go_apart_share_no_scale_with_others() -> None:
    for (first, second), (again, larger) in run_ranks(small_and_large_ones_apart, 2):
        assert first.any()
        assert torch.equal(first, again)
        assert torch.equal(second * 2.0**20, larger)


def test_batches_differ_between_ranks() -> None:
    assert not torch.equal(next(batches(0))[0], next(batches(1))[0])


def wrap_later() -> dict[str, object]:
    state = DDPState(min_bytes=4096)
    hooked = DistributedDataParallel(small_model())
    hooked.register_comm_hook(state, comm.ddp_hook)
    expected = losses_of(hooked)
    model = small_model()
    comm.average_in_fp8(model)
    comm.average_in_fp8(model, state)
    model(torch.ones(1, 32)).sum().backward()  # not wrapped yet
    model.zero_grad()
    copied = pickle.loads(pickle.dumps(model))
    before = comm.statistics()["all_reduce"].calls
    ours = losses_of(DistributedDataParallel(model))
    sent = comm.statistics()["all_reduce"].calls
    own = DistributedDataParallel(copied)
    own.register_comm_hook(None, allreduce_hook)
    plain = losses_of(own)
    after = comm.statistics()["all_reduce"].calls
    again = losses_of(DistributedDataParallel(model))  # whose hook is that of the model, as before
    counted = comm.statistics()["all_reduce"].calls
    around = nn.Sequential(model)
    at_forward(around, None)
    losses_of(DistributedDataParallel(around))
    return {
        "expected": expected,
        "ours": ours,
        "plain": plain,
        "again": again,
        "calls": (sent - before, after - sent, counted - after, comm.statistics()["all_reduce"].calls - counted),
        "hooked": before,
    }


def test_a_wrapper_that_is_made_later_averages_in_fp8_unless_it_has_its_own_hook_or_that_was_taken_back() -> None:
    for rank in run_ranks(wrap_later, 2):
        assert rank["ours"] == rank["expected"]
        assert rank["plain"] != rank["expected"]
        assert rank["again"][0] < 0.5 * rank["ours"][0]
        assert rank["calls"] == (rank["hooked"], 0, rank["hooked"], 0)

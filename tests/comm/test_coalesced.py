"""Many gradients in few messages, and gradients that keep to messages of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fp8booster import comm
from tests.distributed import ranks

SIZES = ((700,), (3, 400), (5000,), (1,), (2,), (1,), (3,))


def _tensors() -> list[torch.Tensor]:
    """Of two dtypes, different on each rank; the second does not lie row by row."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(size, generator=generator) for size in SIZES]
    values[1] = values[1].t().contiguous().t()
    return [value.bfloat16() if number % 2 else value for number, value in enumerate(values)]


@ranks(2)
@pytest.mark.parametrize("op", ["SUM", "AVG"])
def test_coalesced_tensors_are_reduced_in_place(op: str) -> None:
    tensors, expected = _tensors(), _tensors()
    comm.reset_statistics()
    comm.all_reduce_coalesced(tensors, getattr(dist.ReduceOp, op), bucket_bytes=4000)
    # 700, 5000 and 2 + 3 values of FP32 do not fit together, 5000 do not fit at all; 1200, 1 and 1 of BF16 do
    assert comm.statistics()["all_reduce"].calls == 4
    for tensor, value in zip(tensors, expected, strict=True):
        total = value.float()
        dist.all_reduce(total)
        total /= dist.get_world_size() if op == "AVG" else 1
        assert (tensor.float() - total).norm() <= 0.05 * total.norm()
        first = tensor.clone().contiguous()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


class _Two(nn.Module):
    """Two weights, whose gradients lie side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.ones(1000))
        self.replicated = nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return (x * (self.own * scale + self.replicated)).sum()


def _gradient(apart: bool, scale: float) -> torch.Tensor:
    """Of the replicated weight, beside a gradient of this scale."""
    model = DistributedDataParallel(_Two())
    replicated = model.module.replicated
    state = comm.DDPState(apart=(lambda parameter: parameter is replicated) if apart else None)
    model.register_comm_hook(state, comm.ddp_hook)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(dist.get_rank()))
    model(x, scale).backward()
    mean = x.clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    for gradient, exact in ((model.module.own.grad, mean * scale), (replicated.grad, mean)):
        assert (gradient - exact).norm() < 0.1 * exact.norm()
    return replicated.grad


@ranks(2)
def test_a_gradient_apart_is_not_rounded_with_its_neighbours() -> None:
    assert torch.equal(_gradient(True, 1.0), _gradient(True, 30.0))
    assert not torch.equal(_gradient(False, 1.0), _gradient(False, 30.0))

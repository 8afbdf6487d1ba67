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
    assert list(comm.statistics()) == ["all_reduce"]
    assert "all_gather" not in comm.statistics()
    for tensor, value in zip(tensors, expected, strict=True):
        total = value.float()
        dist.all_reduce(total)
        total /= dist.get_world_size() if op == "AVG" else 1
        assert (tensor.float() - total).norm() <= 0.05 * total.norm()
        first = tensor.clone().contiguous()
        dist.broadcast(first, 0)
        assert torch.equal(first, tensor)


@ranks(2)
@pytest.mark.parametrize("op", ["SUM", "AVG", "MAX"])
def test_one_rank_alone_keeps_what_it_has_side_by_side(op: str) -> None:
    alone, _ = dist.new_subgroups(1)
    inputs = [torch.randn(2, 3).bfloat16(), torch.randn(5).bfloat16()]
    output = torch.empty(11, dtype=torch.float32)
    comm.reduce_scatter_coalesced(output, inputs, getattr(dist.ReduceOp, op), alone)
    assert torch.equal(output, torch.cat([each.flatten() for each in inputs]).float())
    assert comm.statistics()["reduce_scatter_tensor"].uncompressed == {"one rank": 1}


@ranks(2)
@pytest.mark.parametrize("op", ["MAX", "MIN"])
def test_other_reductions_of_many_tensors_go_plain(op: str) -> None:
    rank = dist.get_rank()
    inputs = [torch.tensor([[1.0 + rank, 5.0], [4.0 - rank, 2.0]]), torch.tensor([3.0 * rank, 7.0])]
    output = torch.empty(3)
    comm.reduce_scatter_coalesced(output, inputs, getattr(dist.ReduceOp, op), min_bytes=0)
    largest = [[2.0, 5.0, 3.0], [4.0, 2.0, 7.0]]
    smallest = [[1.0, 5.0, 0.0], [3.0, 2.0, 7.0]]
    assert output.tolist() == (largest if op == "MAX" else smallest)[rank]


@ranks(1)
def test_gathers_of_one_rank_move_what_lies_elsewhere_alone() -> None:
    from fp8booster.comm.transport import gather_many

    message, own = torch.zeros(4, dtype=torch.uint8), torch.arange(4, dtype=torch.uint8)
    same = torch.arange(3, dtype=torch.uint8)
    version = same._version
    assert gather_many([(message, own), (same, same)], None) == []
    assert torch.equal(message, own)
    assert same._version == version


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

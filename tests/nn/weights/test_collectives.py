"""What every rank runs: collectives of torch.distributed that write what FP8 layers hold copies of."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, fp8_linear, fuse
from fp8booster.nn.fused.pointwise import row_norm
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax
from fp8booster.nn.weights.freshness import _Changes, weight_states
from tests.distributed import ranks
from tests.nn.fused.models import batch, build
from tests.nn.reference import exact_linear, signal_to_noise

CONFIG = FP8Config(emulate=True)


def coalesced(weight: torch.Tensor) -> None:
    with _coalescing_manager():
        dist.all_reduce(weight)


def received(weight: torch.Tensor) -> None:
    if dist.get_rank() == 0:
        dist.send(weight.detach().clone(), 1)
        dist.recv(weight, 1)
    else:
        own = weight.detach().clone()
        dist.recv(weight, 0)
        dist.send(own, 0)


def received_in_batch(weight: torch.Tensor) -> None:
    other = 1 - dist.get_rank()
    own = weight.detach().clone()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, own, other), dist.P2POp(dist.irecv, weight, other)]):
        work.wait()


def waited_for(weight: torch.Tensor) -> None:
    dist.all_reduce(weight, async_op=True).wait()


WAYS: dict[str, Callable[[torch.Tensor], object]] = {
    "broadcast": lambda weight: dist.broadcast(weight, 1),
    "through .data": lambda weight: dist.broadcast(weight.data, 1),
    "through a view of .data": lambda weight: dist.all_reduce(weight.data.view(-1)[:64]),
    "all_reduce": dist.all_reduce,
    "asynchronous": waited_for,
    "to one rank": lambda weight: dist.reduce(weight, 0),
    "list": lambda weight: dist.all_reduce_coalesced([weight]),
    "coalesced": coalesced,
    "broadcast_coalesced": lambda weight: dist._broadcast_coalesced(dist.group.WORLD, [weight], 2**20, 1),
    "all_gather": lambda weight: dist.all_gather(
        [weight, torch.empty_like(weight)], weight.detach() * (2 - dist.get_rank())
    ),
    "all_gather_into_tensor": lambda weight: dist.all_gather_into_tensor(weight, weight[:24] * 2),
    "reduce_scatter": lambda weight: dist.reduce_scatter(weight, [weight * 2, weight * 3]),
    "reduce_scatter_tensor": lambda weight: dist.reduce_scatter_tensor(weight, torch.cat((weight * 2, weight * 3))),
    "scatter": lambda weight: dist.scatter(
        weight, [torch.ones_like(weight), weight * 2] if dist.get_rank() == 0 else None
    ),
    "gather": lambda weight: dist.gather(
        weight * 2, [weight, torch.empty_like(weight)] if dist.get_rank() == 0 else None
    ),
    "all_to_all_single": lambda weight: dist.all_to_all_single(weight, weight * 2),
    "recv": received,
    "batch_isend_irecv": received_in_batch,
}


@ranks(2)
def test_a_weight_that_a_collective_wrote_is_cast_anew() -> None:
    for way, write in WAYS.items():
        layer = FP8Linear(64, 48, bias=False, config=CONFIG)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(48, 64) * (1 + dist.get_rank()))
        x = torch.randn(16, 64)
        layer(x)
        with torch.no_grad():
            before = layer.weight.clone()
            write(layer.weight)
            changed = not torch.equal(before, layer.weight)
        assert torch.equal(layer(x), fp8_linear(x, layer.weight, config=CONFIG)), way
        changed = torch.tensor(float(changed))
        dist.all_reduce(changed)
        assert changed, f"{way} wrote nothing, so the check above says nothing"


@ranks(2)
def test_merged_weights_that_a_collective_wrote_are_cast_anew() -> None:
    for write in (lambda weight: dist.broadcast(weight, 1), lambda weight: dist.broadcast(weight.data, 1)):
        losses = []
        for synchronize_first in (True, False):
            model = build(dtype=torch.float32)
            fuse(convert_to_fp8(model, CONFIG))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + dist.get_rank())
            ids = batch()
            if not synchronize_first:
                model(input_ids=ids, labels=ids)
            with torch.no_grad():
                for parameter in model.parameters():
                    write(parameter)
            losses.append(model(input_ids=ids, labels=ids).loss.item())
        assert losses[0] == losses[1], losses


@ranks(2)
def test_a_gradient_that_a_hook_reduces_in_place_loses_its_amax() -> None:
    """The norm's backward delivers the amax of the gradient that the layer before it reads."""
    for reduce in (dist.all_reduce, lambda gradient: dist.all_reduce(gradient.view(-1))):
        torch.manual_seed(dist.get_rank())
        layer = FP8Linear(64, 64, bias=False, config=CONFIG)
        dist.broadcast(layer.weight.data, 0)
        x, factors = torch.randn(32, 64), torch.randn(32, 64)
        if dist.get_rank() == 1:
            factors *= 64  # the sum is far beyond the amax that was delivered on rank 0
        seen = []

        def reduce_and_look(gradient: torch.Tensor, reduce: Callable = reduce, seen: list = seen) -> None:
            assert delivered_amax(gradient) is not None
            reduce(gradient)
            seen.append(gradient.clone())

        hidden = layer(x)
        hidden.register_hook(reduce_and_look)
        y, _ = row_norm(hidden, torch.ones(64), 1e-6)
        (y * factors).sum().backward()
        expected = exact_linear(x, layer.weight.detach(), seen[0]).weight
        assert signal_to_noise(expected, layer.weight.grad) > 20


@ranks(2)
def test_a_tensor_that_is_received_loses_its_amax() -> None:
    other = 1 - dist.get_rank()
    x = deliver_amax(torch.ones(4), torch.ones(()))
    works = [dist.isend(torch.full((4,), 9.0), other), dist.irecv(x, other)]
    for work in works:
        work.wait()
    assert delivered_amax(x) is None


@ranks(2)
def test_gradients_that_ranks_reduce_leave_weights_fresh() -> None:
    _Changes.watched.clear()  # a gradient may lie where a weight of an earlier check lay
    model = nn.Sequential(FP8Linear(64, 64, config=CONFIG), FP8Linear(64, 64, config=CONFIG))
    wrapped = DistributedDataParallel(model)
    x = torch.randn(16, 64)
    wrapped(x).sum().backward()
    torch.optim.SGD(model.parameters()).step()  # until the first, each backward counts as one
    before = weight_states([layer.weight for layer in model])
    for _ in range(2):
        wrapped(x).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    assert weight_states([layer.weight for layer in model]) == before


@ranks(2)
def test_inference_tensors_can_be_reduced() -> None:
    with torch.inference_mode():
        x = torch.ones(4)
        dist.all_reduce(x)
    assert torch.equal(x, torch.full((4,), 2.0))

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8booster import FP8Config, comm, convert_to_fp8, report
from fp8booster.nn.fuse import fuse
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Linear
from fp8booster.nn.weights.resharded import ReshardedWeight
from tests.distributed import run_ranks
from tests.nn.fsdp.resharding import follow_resharding
from tests.nn.fused.models import batch, build

CONFIGS = [FP8Config(scaling=each) for each in ("tensorwise", "rowwise", "blockwise")]


def layers(config: FP8Config) -> tuple[FP8Linear, FP8Linear]:
    """A layer that keeps its FP8 weight, and one that does not."""
    torch.manual_seed(0)
    kept = FP8Linear(64, 48, config=config)
    resharded = copy.deepcopy(kept)
    follow_resharding(resharded)
    assert type(resharded.fp8_weight) is ReshardedWeight
    return kept, resharded


@pytest.mark.parametrize("config", CONFIGS)
def test_the_bits_are_those_of_a_layer_that_keeps_its_weight(config: FP8Config) -> None:
    kept, resharded = layers(config)
    for training in (True, False):
        results = []
        for layer in (kept.train(training), resharded.train(training)):
            x = torch.ones(20, 64).cumsum(0).requires_grad_()
            y = layer(x)
            results.append((y, *torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias))))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_backward_reads_the_weight_as_it_is_then() -> None:
    kept, resharded = layers(FP8Config())
    x = torch.randn(20, 64, requires_grad=True)
    y = resharded(x)
    storage = resharded.weight.untyped_storage()
    values, size = resharded.weight.detach().clone(), storage.size()
    storage.resize_(0)  # as FSDP frees what it gathered
    storage.resize_(size)
    resharded.weight.data.copy_(values)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(kept(x).sum(), x)
    assert torch.equal(dx, expected)


def test_a_load_is_seen_by_a_weight_that_counts_no_change() -> None:
    """FSDP2 gathers what was loaded into the memory that held the weight before, and keeps the count of changes."""
    one, other = FP8Linear(64, 48), FP8Linear(64, 48)
    x = torch.randn(20, 64)
    one(x)
    with torch.autograd._unsafe_preserve_version_counter((one.weight, one.bias)):
        one.load_state_dict(other.state_dict())
    assert torch.equal(one(x), other(x))


def train_with_fsdp2() -> dict[str, list]:
    """Losses of layers sharded by FSDP2, and how many of them hold an FP8 weight between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    results: dict[str, list] = {}
    for name in ("kept", "followed", "sent in FP8"):
        sharded = convert_to_fp8(copy.deepcopy(model), FP8Config(emulate=True))
        for layer in sharded:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
        if name != "kept":
            follow_resharding(sharded)
        if name == "sent in FP8":
            comm.compress_fsdp(sharded, min_bytes=0)
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        losses = []
        for _ in range(10):
            x = torch.randn(32, 64, generator=generator)
            loss = (sharded(x) - x.roll(1, 1)).square().mean()
            held = sum(layer.fp8_weight.held is not None for layer in sharded)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results[name] = [losses, held]
    return results


def train_fused_with_fsdp2() -> dict[str, list[float]]:
    """Losses of a small LLaMA sharded by FSDP2, with merged layers and without."""
    mesh = init_device_mesh("cpu", (2,))
    results = {}
    for name in ("unfused", "kept", "followed"):
        model = convert_to_fp8(build(dtype=torch.float32), FP8Config(emulate=True))
        if name != "unfused":
            fuse(model)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if name != "kept":
            follow_resharding(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        results[name] = []
        for _ in range(4):
            ids = batch()
            loss = model(input_ids=ids, labels=ids).loss
            held = sum(merged.fp8_weight.held is not None for merged in merged_layers(model))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results[name].append(loss.item())
        assert held == (4 if name == "kept" else 0), (name, held)
        if name != "unfused":
            assert "10 of them merged to 4 products" in report(model).summary()
    return results


def load_under_fsdp2() -> None:
    """Without `follow_resharding` what is loaded between two forwards of one step is what the second computes with."""
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(32, 64)
    models = [convert_to_fp8(nn.Sequential(nn.Linear(64, 64)), FP8Config(emulate=True)) for _ in range(2)]
    for model in models:
        fully_shard(model, mesh=mesh)
        model(x)
    models[1].load_state_dict(models[0].state_dict())
    assert torch.equal(models[0](x), models[1](x))


def train_both_with_fsdp2() -> tuple[dict[str, list], dict[str, list[float]]]:
    """In one start of the ranks."""
    load_under_fsdp2()
    return train_with_fsdp2(), train_fused_with_fsdp2()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[str, list], dict[str, list[float]]]]:
    """What each of two ranks found."""
    return run_ranks(train_both_with_fsdp2, 2)


def test_layers_sharded_by_fsdp2_hold_no_fp8_weight_and_compute_the_same_bits(ranks: list[tuple]) -> None:
    for rank, _ in ranks:
        (kept, held), (followed, held_after), (sent, _) = rank.values()
        assert (held, held_after) == (3, 0)
        assert followed == kept
        assert kept[-1] < 0.9 * kept[0]
        assert sent != kept
        assert all(abs(one - other) < 0.03 * one for one, other in zip(kept, sent, strict=True))


def test_merged_layers_sharded_by_fsdp2_hold_no_fp8_weight_and_compute_the_same_bits(ranks: list[tuple]) -> None:
    for _, rank in ranks:
        unfused, kept, followed = rank.values()
        assert followed == kept
        assert kept[-1] < kept[0]
        assert all(abs(one - other) < 0.02 * one for one, other in zip(unfused, kept, strict=True)), rank

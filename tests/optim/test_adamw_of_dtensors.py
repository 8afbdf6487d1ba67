"""AdamW with 8-bit moments on DTensors, as FSDP2 makes parameters: each rank updates its own part."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fp8booster
from fp8booster import FP8Config
from fp8booster.optim import AdamW
from tests.distributed import ranks
from tests.nn.fused.models import batch, build

SETTINGS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
DTYPES = [torch.float32, torch.bfloat16]


def plain(dtype: torch.dtype) -> nn.Module:
    """Whose first weight has a block of 256 values, or several, on each rank, and the others odd sizes, or none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)


def sharded(dtype: torch.dtype, mesh: DeviceMesh | None = None, cls: type = AdamW) -> tuple[nn.Module, Any]:
    model = plain(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh)
    return model, cls(model.parameters(), **SETTINGS)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Steps `first` to `last` - 1, of data that are the same on all ranks."""
    losses = []
    for number in range(first, last):
        torch.manual_seed(number)
        x = torch.randn(16, 64, dtype=next(model.parameters()).dtype)
        loss = (model(x) - x[:, :1]).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_learn_as_whole_parameters_do(dtype: torch.dtype) -> None:
    model, optimizer = sharded(dtype)
    other = plain(dtype)
    losses = [learn(model, optimizer, 0, 20), learn(other, torch.optim.AdamW(other.parameters(), **SETTINGS), 0, 20)]
    assert losses[0][-1] < losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=0.05 if dtype is torch.bfloat16 else 0.02)
    # codes lie on each rank for its part alone
    held = sum(state.nbytes for state in optimizer.state.values())
    parts = sum(each.to_local().numel() for each in model.parameters())
    assert held < (4.5 if dtype is torch.bfloat16 else 2.5) * parts + 12 * len(list(model.parameters()))
    assert sum(each.numel() for each in model.parameters()) > 1.9 * parts


@ranks(2)
def test_ranks_round_by_chance_of_their_own_and_copies_of_a_part_alike() -> None:
    mesh = init_device_mesh("cpu", (2,))
    codes = []
    for placement, size in ((Replicate(), 256), (Shard(0), 512)):
        parameter = nn.Parameter(distribute_tensor(torch.ones(size), mesh, [placement]))
        optimizer = AdamW([parameter], **SETTINGS)
        for _ in range(3):
            gradient = torch.linspace(0.1, 1, 256)  # the same for both halves
            parameter.grad = DTensor.from_local(gradient, mesh, [placement], run_check=False)
            optimizer.step()
        codes.append(optimizer.state[parameter].codes["exp_avg_sq"])
    gathered = [[torch.empty_like(code) for _ in range(2)] for code in codes]
    for code, of_ranks in zip(codes, gathered, strict=True):
        dist.all_gather(of_ranks, code)
    assert torch.equal(*gathered[0])
    assert not torch.equal(*gathered[1])


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_replicas_stay_alike(dtype: torch.dtype) -> None:
    """As under hybrid sharding: two copies of one part."""
    model, optimizer = sharded(dtype, init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    learn(model, optimizer, 0, 5)
    for parameter in model.parameters():
        mine = parameter.to_local().detach()
        of_ranks = [torch.empty_like(mine) for _ in range(2)]
        dist.all_gather(of_ranks, mine)
        assert torch.equal(*of_ranks)


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_distributed_checkpoint_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model, optimizer = sharded(dtype)
    learn(model, optimizer, 0, 4)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    right = learn(model, optimizer, 4, 8)

    model, optimizer = sharded(dtype)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    found = learn(model, optimizer, 4, 8)
    assert found == right

    # torch's optimizer reads it too, without FSDP2
    alone = plain(dtype)
    inside = torch.optim.AdamW(alone.parameters(), **SETTINGS)
    weights, states = get_state_dict(alone, inside)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(alone, inside, model_state_dict=weights, optim_state_dict=states)
    assert learn(alone, inside, 4, 8) == pytest.approx(right, rel=0.05)


FORMS = {
    "whole": StateDictOptions(full_state_dict=True),
    "whole on the first rank": StateDictOptions(full_state_dict=True, cpu_offload=True),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
    "on the host": StateDictOptions(cpu_offload=True),
}


@ranks(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_forms_of_torchs_state_dicts_go_on_bit_for_bit(dtype: torch.dtype, form: str) -> None:
    """A rank without a part of some parameters makes states in another order than the others, which gather them."""
    options = loading = FORMS[form]
    if "first rank" in form:
        loading = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model, optimizer = sharded(dtype)
    learn(model, optimizer, 0, 4)
    assert any(not each.to_local().numel() for each in model.parameters()) is (dist.get_rank() == 1)
    weights, states = map(copy.deepcopy, get_state_dict(model, optimizer, options=options))
    right = learn(model, optimizer, 4, 8)

    model, optimizer = sharded(dtype)
    set_model_state_dict(model, weights, options=loading)
    set_optimizer_state_dict(model, optimizer, states, options=loading)
    assert learn(model, optimizer, 4, 8) == right


@ranks(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_distributed_checkpoint_of_torchs_adamw_goes_on(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    model, inside = sharded(dtype, cls=torch.optim.AdamW)
    learn(model, inside, 0, 4)
    weights, states = get_state_dict(model, inside)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    saved, right = whole(model), learn(model, inside, 4, 8)

    model, optimizer = sharded(dtype)
    weights, states = get_state_dict(model, optimizer)
    # which FP32 weights do without, and BF16 ones need
    planner = DefaultLoadPlanner(allow_partial_load=dtype is torch.bfloat16)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0], planner=planner)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    for name, value in whole(model).items():
        assert torch.equal(value, saved[name])
    assert learn(model, optimizer, 4, 8) == pytest.approx(right, rel=0.02)


@ranks(4)
def test_shards_of_shards_round_by_chance_of_their_own_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    """As FSDP2 makes them of what tensor parallelism has sharded."""
    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def start() -> tuple[nn.Module, AdamW]:
        model = plain(torch.bfloat16)[:3]
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        return model, AdamW(model.parameters(), **SETTINGS)

    model, optimizer = start()
    numbers: list[Any] = [None] * 4
    dist.all_gather_object(numbers, optimizer._numbers[model[0].weight])
    assert len(set(numbers)) == 4
    learn(model, optimizer, 0, 3)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    right = learn(model, optimizer, 3, 6)

    model, optimizer = start()
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert learn(model, optimizer, 3, 6) == right


@ranks(2)
def test_a_state_dict_of_whole_tensors_is_taken_apart() -> None:
    """As a plain run's `full_state_dict`, or one gathered on all ranks."""
    other = plain(torch.bfloat16)
    before = AdamW(other.parameters(), **SETTINGS)
    learn(other, before, 0, 4)
    saved, weights = copy.deepcopy(before.full_state_dict()), whole(other)
    model, optimizer = sharded(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
    optimizer.load_state_dict(saved)
    for name, value in whole(model).items():
        assert torch.equal(value, weights[name])
    for number, state in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(
                state[name].full_tensor(), saved["state"][number][name], rtol=0.05, atol=1e-4, msg=name
            )
    for number, state in optimizer.full_state_dict()["state"].items():
        assert torch.equal(state["master"].full_tensor(), saved["state"][number]["master"])
    assert learn(model, optimizer, 4, 8) == pytest.approx(learn(other, before, 4, 8), rel=0.05)
    with pytest.raises(ValueError, match="load the states of this model"):
        optimizer.load_state_dict(
            {**saved, "state": {0: {"step": 1, "exp_avg": torch.ones(7), "exp_avg_sq": torch.ones(7)}}}
        )


@ranks(2)
def test_fp8_layers_are_gathered_as_the_step_left_them() -> None:
    """FSDP2 by one call: the gathered bytes are those of a model that is made from the weights anew."""
    config = FP8Config(emulate=True)
    model = fp8booster.fully_shard(build(), config)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(input_ids=batch(), labels=batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    fresh = build()
    with torch.no_grad():
        for name, parameter in fresh.named_parameters():
            parameter.copy_(dict(model.named_parameters())[name].full_tensor())
    fresh = fp8booster.fully_shard(fresh, config)
    assert torch.equal(*(each(input_ids=batch(), labels=batch()).loss.detach() for each in (model, fresh)))
    assert losses[-1] < losses[0]


@ranks(2)
def test_parameters_that_dtensors_replace_are_numbered_anew() -> None:
    """As Accelerate does: the optimizer is made first; FSDP2 leaves parameters as they are that it shall ignore."""
    for ignored in ([], [2]):
        models = [plain(torch.float32) for _ in range(2)]
        optimizers = [AdamW(models[0].parameters(), **SETTINGS)]
        for model in models:
            left = {parameter for place in ignored for parameter in model[place].parameters()}
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)), ignored_params=left)
        optimizers[0].param_groups[0]["params"] = list(models[0].parameters())
        optimizers.append(AdamW(models[1].parameters(), **SETTINGS))
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.linspace(-1, 1, 128).view(2, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, value in whole(models[0]).items():
            assert torch.equal(value, whole(models[1])[name])


def test_tensors_that_are_no_dtensors_in_the_place_of_parameters_are_refused() -> None:
    model = plain(torch.float32)
    optimizer = AdamW(model.parameters(), **SETTINGS)
    other = plain(torch.float32)
    optimizer.param_groups[0]["params"] = list(other.parameters())
    other(torch.ones(2, 64)).sum().backward()
    with pytest.raises(TypeError, match="an engine has put tensors in the place"):
        optimizer.step()

"""Weights that are gathered late (`overlap_allgather`): whatever reads them waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster import FP8Config
from tests.colossal.hybrid.runs import arguments_of
from tests.colossal.zero.runs import batch, masters
from tests.distributed import ranks, shared_folder
from tests.plugins.training import Boosted, assert_equal, boost, ours, train


@contextmanager
def gathered_when_waited_for() -> Iterator[None]:
    """Late gathers begin when something waits for them: what does not wait reads the weights of the former step."""
    from fp8booster.colossal.zero import optimizer

    gather = optimizer.all_gather_into_flat_tensor_nd

    def late(whole: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if not async_op:
            return gather(whole, part, group)
        return SimpleNamespace(wait=lambda: gather(whole, part, group))

    with mock.patch.object(optimizer, "all_gather_into_flat_tensor_nd", late):
        yield


def plugin_of(name: str, late: bool) -> Any:
    from fp8booster.plugins import HybridParallelPlugin

    fused = name.endswith("fused")
    options = {"use_fp8": True, "fp8_config": FP8Config(fused=fused, emulate=True), "overlap_allgather": late}
    if name.startswith("hybrid"):
        return HybridParallelPlugin(**arguments_of("DP2 ZeRO 1"), **options)
    return ours(stage=2, **options)


def whole_file(run: Boosted, name: str) -> dict[str, torch.Tensor]:
    path = shared_folder("late") / f"{name}.safetensors"
    run.booster.save_model(run.model, str(path), use_safetensors=True)
    dist.barrier()
    return load_file(path)


def several_files(run: Boosted, name: str) -> dict[str, torch.Tensor]:
    path = shared_folder("late") / f"{name} in parts"
    run.booster.save_model(run.model, str(path), shard=True, size_per_shard=1, use_safetensors=True)
    dist.barrier()
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def evaluated(run: Boosted, name: str) -> dict[str, torch.Tensor]:
    run.model.eval()
    with torch.no_grad():
        return {"loss": run.loss(batch())}


def trained_on(run: Boosted, name: str) -> dict[str, torch.Tensor]:
    return {"losses": torch.tensor(train(run, steps=2))} | masters(run)


def after_a_load(run: Boosted, name: str) -> dict[str, torch.Tensor]:
    """A gather that ended later would put the former weights over the loaded ones."""
    path = shared_folder("late") / f"{name} to load.safetensors"
    run.booster.save_model(run.model, str(path), use_safetensors=True)
    dist.barrier()
    train(run, steps=1)
    run.booster.load_model(run.model, str(path))
    return {"loss": run.loss(batch()).detach()} | run.parameters()


READERS: dict[str, Callable[[Boosted, str], dict[str, torch.Tensor]]] = {
    "a checkpoint": whole_file,
    "a checkpoint in parts": several_files,
    "evaluation": evaluated,
    "training": trained_on,
    "training after a load": after_a_load,
}


@ranks(2)
@pytest.mark.parametrize("plugin", ["ZeRO", "ZeRO, fused", "hybrid", "hybrid, fused"])
@pytest.mark.parametrize("reader", READERS)
def test_late_gathers_are_waited_for(plugin: str, reader: str) -> None:
    found = []
    for late in (False, True):
        run = boost(plugin_of(plugin, late))
        with gathered_when_waited_for():
            train(run, steps=1)
            handles = [hasattr(each, "_all_gather_handle") for each in run.model.unwrap().parameters()]
            assert any(handles) is late
            found.append(READERS[reader](run, f"{plugin}, {reader}, {late}"))
    assert_equal(*found)

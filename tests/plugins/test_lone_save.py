"""What rank 0 can save alone: what Colossal-AI's plugins can, or it is told that every rank must call."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from fp8booster.colossal.zero import lone_save
from tests.colossal.hybrid.runs import arguments_of
from tests.distributed import ranks, shared_folder
from tests.plugins.training import Boosted, boost, ours, train

PATIENCE = 0.5
"""Seconds in place of `lone_save.PATIENCE`, where rank 1 does not come."""

WITH_ZERO = ("LowLevelZero, stage 1", "LowLevelZero, stage 2", "hybrid, DP2 ZeRO 1")
"""Where each rank holds a part of the weights of FP8 layers."""

WHOLE_ON_EACH_RANK = ("hybrid, DP2", "DDP")


def run_of(plugin: str, use_fp8: bool) -> Boosted:
    """A tiny model after a step."""
    from fp8booster.plugins import HybridParallelPlugin, TorchDDPPlugin

    kind, _, mode = plugin.partition(", ")
    if kind == "DDP":
        run = boost(TorchDDPPlugin(use_fp8=use_fp8), mixed_precision="bf16")
    elif kind == "hybrid":
        run = boost(HybridParallelPlugin(**arguments_of(mode), use_fp8=use_fp8))
    else:
        run = boost(ours(stage=int(mode[-1]), use_fp8=use_fp8))
    train(run, steps=1)
    return run


def save(run: Boosted, name: str, shard: bool) -> torch.Tensor:
    """Save the model; returns a weight of it as it was written."""
    path = shared_folder("lone") / name
    run.booster.save_model(run.model, str(path), shard=shard, use_safetensors=True)
    (file,) = path.glob("*.safetensors") if shard else [path]
    return load_file(file)["model.layers.0.mlp.up_proj.weight"]


@ranks(2)
@pytest.mark.parametrize("plugin", [*WITH_ZERO, *WHOLE_ON_EACH_RANK])
def test_rank_0_alone_saves_a_model_in_16_bits(plugin: str) -> None:
    run = run_of(plugin, use_fp8=False)
    if dist.get_rank() == 0:
        for shard in (True, False):
            save(run, f"{plugin} {shard}.safetensors", shard)
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("plugin", WHOLE_ON_EACH_RANK)
def test_rank_0_alone_saves_a_model_whose_weights_are_whole(plugin: str) -> None:
    run = run_of(plugin, use_fp8=True)
    if dist.get_rank() == 0:
        for shard in (True, False):
            save(run, f"{plugin} FP8 {shard}.safetensors", shard)
    dist.barrier()


@ranks(2)
@pytest.mark.parametrize("plugin", WITH_ZERO)
def test_rank_0_alone_is_told_to_call_on_every_rank(plugin: str) -> None:
    run = run_of(plugin, use_fp8=True)
    if dist.get_rank() == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lone_save, "PATIENCE", PATIENCE)
            for shard in (True, False):
                with pytest.raises(RuntimeError, match=r"rank 1 did not join it .* on every rank"):
                    save(run, f"{plugin} refused {shard}.safetensors", shard)
    dist.barrier()
    # it has not lost count: all ranks together save, one of them late
    train(run, steps=1)
    if dist.get_rank() == 0:
        written = save(run, f"{plugin} whole", shard=True)
    else:
        time.sleep(0.5)
        run.booster.save_model(
            run.model, str(shared_folder("lone") / f"{plugin} whole"), shard=True, use_safetensors=True
        )
    working = run.parameters()["model.layers.0.mlp.up_proj.weight"]
    if dist.get_rank() == 0:
        assert torch.equal(written, working)  # of which `parameters` has just gathered the masters' values

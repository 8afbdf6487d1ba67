"""A boosted model leaves a step out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fp8booster import FP8Config
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from fp8booster.training.boosted import BoostedModel

PLUGINS = ("low_level_zero", "gemini", "hybrid", "ddp", "fsdp")


def start(name: str, scaling: str) -> BoostedModel:
    """`tiny_llama` under a plugin, in FP8 everywhere."""
    from fp8booster import plugins
    from fp8booster.training.boosted import BoostedModel

    how: dict[str, Any] = {"use_fp8": True, "fp8_config": FP8Config(emulate=True, always=True, scaling=scaling)}
    plugin = {
        "low_level_zero": lambda: plugins.LowLevelZeroPlugin(stage=2, precision="bf16", **how),
        "gemini": lambda: plugins.GeminiPlugin(precision="bf16", **how),
        "hybrid": lambda: plugins.HybridParallelPlugin(tp_size=1, pp_size=1, precision="bf16", **how),
        "ddp": lambda: plugins.TorchDDPPlugin(**how),
        "fsdp": lambda: plugins.TorchFSDPPlugin(**how),
    }[name]()
    network = tiny_llama()
    optimizer = torch.optim.Adam if name == "gemini" else torch.optim.AdamW
    run = BoostedModel(name, plugin, network, optimizer(network.parameters(), lr=1e-2))
    run.model.train()
    return run


def losses(run: BoostedModel, seeds: range) -> list[float]:
    from fp8booster.training.boosted import causal

    found = []
    for seed in seeds:
        found.append(run.forward_backward([causal(token_batch(seed))]).item())
        run.update(1.0)
    return found


@ranks(2)
@pytest.mark.parametrize("scaling", ["delayed", "smooth-swiglu"])
@pytest.mark.parametrize("name", PLUGINS)
def test_a_step_that_is_abandoned_is_as_if_it_had_not_been(name: str, scaling: str) -> None:
    from fp8booster.training.boosted import causal

    expected, disturbed = (start(name, scaling) for _ in range(2))
    for run in (expected, disturbed):
        losses(run, range(1))
    block = next(module for module in disturbed.model.unwrap().modules() if hasattr(module, "gate_proj"))
    for factor in (100.0, math.inf):
        hook = block.register_forward_pre_hook(lambda _, args, factor=factor: (factor * args[0],))
        loss = disturbed.forward_backward([causal(token_batch(9))])
        hook.remove()
        assert loss.isfinite() == math.isfinite(factor)
        assert disturbed.is_finite()  # also while nothing is forgotten: no step has used it
        disturbed.abandon()
        assert disturbed.is_finite()
    # the disturbed one first: steps of the other would count as steps of its own
    found = losses(disturbed, range(1, 4))
    assert found == losses(expected, range(1, 4))

"""Delayed and constant scales under the plugins: runs that stay close to those with real-time scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config, report
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT, Delayed
from tests.colossal.hybrid import runs as hybrid
from tests.distributed import ranks
from tests.plugins.training import Boosted, assert_close, boost, ours, train

REAL_TIME = FP8Config(emulate=True)
SCALINGS = (FP8Config(scaling="delayed", emulate=True), FP8Config(scaling="constant", emulate=True))
CLOSE = 1e-2


def holders(run: Boosted) -> list[Any]:
    """What has casts in a model: layers, and those that run as one."""
    model = run.model.unwrap()
    return [*(module for module in model.modules() if isinstance(module, FP8Layer)), *merged_layers(model)]


def histories(run: Boosted) -> dict[str, list[torch.Tensor]]:
    """By role, the amaxes of all that were cast."""
    found: dict[str, list[torch.Tensor]] = {WEIGHT: [], INPUT: [], OUTPUT_GRADIENT: []}
    for holder in holders(run):
        for role, history in holder.fp8_casts.state.by_role.items():
            found[role].append(history.amaxes)
    return found


def plugin_of(name: str, config: FP8Config) -> Any:
    """A plugin with FP8 everywhere."""
    from fp8booster.plugins import GeminiPlugin, TorchDDPPlugin, TorchFSDPPlugin

    arguments = {"use_fp8": True, "fp8_config": config}
    if name == "low_level_zero":
        return ours(stage=2, **arguments)
    if name == "gemini":
        return GeminiPlugin(precision="bf16", **arguments)
    return {"ddp": TorchDDPPlugin, "fsdp": TorchFSDPPlugin}[name](**arguments)


@ranks(2)
@pytest.mark.parametrize("name", ["low_level_zero", "gemini", "ddp", "fsdp"])
def test_a_plugin_trains_with_every_scaling(name: str) -> None:
    optimizer = torch.optim.Adam if name == "gemini" else torch.optim.AdamW
    right = train(boost(plugin_of(name, REAL_TIME), optimizer=optimizer, lr=1e-3), steps=4)
    for config in SCALINGS:
        run = boost(plugin_of(name, config), optimizer=optimizer, lr=1e-3)
        losses = train(run, steps=4)
        assert_close(right, losses, CLOSE, gradients=False)
        assert losses != right
        # where an engine casts the weights from the first step or from the second on
        engine_casts = name in ("low_level_zero", "gemini", "fsdp")
        if config.scaling == Delayed():
            found = histories(run)
            steps_seen = [(amaxes[1:] > 0).sum().item() for amaxes in found[INPUT] + found[OUTPUT_GRADIENT]]
            assert steps_seen
            assert set(steps_seen) == {3}
            if engine_casts:
                assert all((amaxes[2:] == 0).all() for amaxes in found[WEIGHT])
            else:
                assert found[WEIGHT]
        notes = [row.notes for row in report(run.model.unwrap()).fp8]
        assert notes
        assert all(f"{config.scaling.name} scales" in note for note in notes)
        assert all(("that an engine casts" in note) == engine_casts for note in notes)


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2 ZeRO 1", "TP2 split_gather", "PP2 1f1b", "PP2 zbv"])
def test_a_mode_of_hybrid_parallelism_trains_with_delayed_scales(mode: str) -> None:
    right = hybrid.learn(hybrid.start(hybrid.fp8(mode, fp8_config=REAL_TIME)), last=4)
    run = hybrid.start(hybrid.fp8(mode, fp8_config=SCALINGS[0]))
    losses = hybrid.learn(run, last=4)
    assert_close(right, losses, CLOSE, gradients=False)
    assert losses != right
    found = histories(run)
    assert found[INPUT]
    assert all((amaxes > 0).sum() == 4 for amaxes in found[INPUT] + found[OUTPUT_GRADIENT])
    if mode == "TP2 split_gather":  # inputs of what is merged are gathered
        for merged in merged_layers(run.model.unwrap()):
            amaxes = merged.fp8_casts.state.by_role[INPUT].amaxes
            others = [torch.empty_like(amaxes) for _ in range(2)]
            dist.all_gather(others, amaxes)
            assert torch.equal(*others)


@ranks(2)
def test_micro_batches_and_checkpointing_have_the_scales_of_a_step() -> None:
    losses = []
    for checkpointed in (False, True):
        run = boost(plugin_of("low_level_zero", SCALINGS[0]), lr=1e-3)
        if checkpointed:
            run.model.unwrap().gradient_checkpointing_enable({"use_reentrant": False})
        losses.append((train(run, steps=3, micro_batches=2), run.parameters()))
    (one, weights), (other, others) = losses
    assert one == other
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())

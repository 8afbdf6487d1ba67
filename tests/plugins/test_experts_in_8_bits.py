"""Experts, modules or one parameter, with 8-bit optimizer states and gradients reduced in FP8, under each engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fp8booster import FP8Config, comm, fully_shard, report
from fp8booster.nn.experts.spread import spread_of
from fp8booster.optim import AdamW
from tests.distributed import ranks
from tests.nn.experts.families import batch_of, tiny_mixture
from tests.plugins import training
from tests.plugins.test_moe_families import plugin as moe

FAMILY, RATE, STEPS = "Qwen3-MoE", 3e-3, 5
IN_FP8 = {"use_fp8": True, "fp8_config": FP8Config(emulate=True, always=True)}


def gemini() -> Any:
    from fp8booster.plugins import GeminiPlugin

    return GeminiPlugin(precision="bf16", **IN_FP8)


PLUGINS = {
    "MoE": lambda: moe(2, **IN_FP8),
    "ZeRO 1": lambda: training.ours(stage=1, **IN_FP8),
    "ZeRO 2": lambda: training.ours(stage=2, **IN_FP8),
    "Gemini": gemini,
}


class Sharded:
    """A model in plain PyTorch under FSDP2, with an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.model = fully_shard(tiny_mixture(FAMILY).bfloat16(), IN_FP8["fp8_config"])
        self.optimizer = optimizer(self.model.parameters(), lr=RATE)

    def step(self, tokens: torch.Tensor) -> list[float]:
        """Take a step; the loss."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item()]


def start(engine: str, optimizer: Any) -> Any:
    """Something with `model`, `optimizer` and `step`."""
    if engine == "FSDP2":
        return Sharded(optimizer)
    return training.boost(PLUGINS[engine](), tiny_mixture(FAMILY), lr=RATE, optimizer=optimizer)


def experts_of(model: nn.Module) -> int:
    """How many values the experts of a model have on one rank, if it has all or a part of them."""
    return sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)


def assert_trains(engine: str, reduced: bool = True) -> None:
    expected, run = start(engine, torch.optim.AdamW), start(engine, AdamW)
    tokens = batch_of(dist.get_rank(), length=64)
    losses = [[each.step(tokens)[0] for _ in range(STEPS)] for each in (expected, run)]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1][-1] < 0.9 * losses[1][0]
    inner = getattr(run.optimizer, "optim", run.optimizer)
    states = [state.codes["exp_avg"] for state in inner.state.values()]
    held = sum(each.numel() for each in states)
    if engine == "Gemini":  # whose optimizer holds parts of chunks
        assert held >= experts_of(tiny_mixture(FAMILY)) // 4
    else:  # of each value that this rank updates, of experts as of all else
        assert held == sum(_local(each).numel() for group in inner.param_groups for each in group["params"])
    assert {each.dtype for each in states} == {torch.int8}
    assert len(report(run.model).loads) == 2  # of either layer's block
    comm.reset_statistics()
    run.step(tokens)
    counted = comm.statistics()
    rows = [counted[name] for name in ("reduce_scatter_tensor", "all_reduce")]
    if reduced:
        # half of the gradients of this rank's experts leave it, in BF16 or in FP8
        raw, wire = (sum(getattr(row, name) for row in rows) for name in ("raw_bytes", "wire_bytes"))
        assert raw >= experts_of(tiny_mixture(FAMILY)) // (2 if engine == "MoE" else 1), counted
        assert wire < 0.6 * raw, counted


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@ranks(2)
@pytest.mark.parametrize("engine", ["ZeRO 1", "ZeRO 2", "Gemini", "FSDP2"])
def test_experts_train_with_8_bit_states_and_gradients(engine: str) -> None:
    assert_trains(engine)


@ranks(4)
def test_experts_that_are_spread_do_too() -> None:
    """On two ranks each, of which two more hold copies, over which their gradients are reduced."""
    assert_trains("MoE")


@ranks(2)
def test_experts_of_one_rank_alone_keep_8_bit_states() -> None:
    assert_trains("MoE", reduced=False)
    run = start("MoE", AdamW)
    assert any(spread_of(each) is not None for each in run.model.parameters())

"""Every mode of `HybridParallelPlugin` learns in FP8 what one process learns in FP8."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist
from torch import nn

from fp8booster.training.optimizers import WarmupCosine
from tests.colossal.hybrid.runs import MODES, fp8, learn, learn_alone, parts, sizes, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks

if TYPE_CHECKING:
    from colossalai.booster.plugin import HybridParallelPlugin as NativePlugin

STEPS = 30
LAST = 5
"""Steps whose mean loss is compared."""

SCHEDULE = WarmupCosine(peak=2e-3, floor=0.0, warmup=5, decay=STEPS)
"""Ends at zero: at a rate that stays high two runs part by more than FP8's rounding explains. At twice the rate the
loss of single batches does too, on some processors."""

WITHIN = 0.01


@functools.cache
def alone(layers: int) -> list[float]:
    """The losses of one process with a LLaMA of so many layers."""
    return of_first_process(lambda: tiny_llama(**sizes(num_hidden_layers=layers)))


def of_first_process(model: Callable[[], nn.Module]) -> list[float]:
    """The losses with which the first process learns by itself, while the others wait."""
    losses: list[list[float] | None] = [None]
    if dist.get_rank() == 0:
        losses = [learn_alone(STEPS, SCHEDULE, model())]
    dist.broadcast_object_list(losses)
    return losses[0]


def assert_follows(plugin: NativePlugin) -> None:
    """The losses of a layer for each part of a pipeline fall as those of one process do, and end within 1 % of them."""
    layers = parts(plugin)
    model = tiny_llama(**sizes(num_hidden_layers=layers))
    assert_close_over_steps(learn(start(plugin, model), last=STEPS, schedule=SCHEDULE), alone(layers))


def assert_close_over_steps(losses: list[float], expected: list[float]) -> None:
    """Both fall alike, and end within 1 % of each other."""
    assert len(losses) == STEPS
    assert expected[-1] < 0.75 * expected[0], expected
    end, expected_end = statistics.fmean(losses[-LAST:]), statistics.fmean(expected[-LAST:])
    assert abs(end / expected_end - 1) < WITHIN, (end, expected_end)
    apart = statistics.fmean(abs(one / other - 1) for one, other in zip(losses, expected, strict=True))
    assert apart < WITHIN, apart


LEARN = [mode for mode in MODES if mode not in ("DP2 ZeRO 2", "TP2", "SP2 all_to_all", "PP2 1f1b")]
"""Stage 2 has the bits of stage 1. Each of the others learns under ZeRO, and what it is a mode of without ZeRO too."""


@ranks(2)
@pytest.mark.parametrize("mode", LEARN)
def test_the_loss_follows_one_process_in_fp8(mode: str) -> None:
    micro_batches = {"num_microbatches": 2} if "pp_size" in MODES[mode] else {}
    assert_follows(fp8(MODES[mode] | micro_batches))

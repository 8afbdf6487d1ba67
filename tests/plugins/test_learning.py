"""LowLevelZero, Gemini and FSDP learn in FP8 what one process learns in FP8; `test_torch_ddp` has DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid.runs import batches, sizes
from tests.colossal.hybrid.test_learning import SCHEDULE, STEPS, alone, assert_close_over_steps
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins import training
from tests.plugins.training import Boosted


def gemini(**arguments: Any) -> Boosted:
    """`GeminiPlugin`, in chunks small enough that the model is sharded."""
    return gemini_runs.boost(gemini_runs.wire(**arguments), tiny_llama(**sizes()))


def _low_level_zero() -> Boosted:
    return training.boost(training.ours(stage=2, use_fp8=True), tiny_llama(**sizes()))


def fsdp(wrapping: str) -> Boosted:
    """`TorchFSDPPlugin` with one of `fsdp_runs.WRAPPINGS`."""
    from tests.plugins.fsdp_runs import WRAPPINGS, fp8

    return training.boost(fp8(fp8_config=None, **WRAPPINGS[wrapping]), tiny_llama(**sizes()))


RUNS: dict[str, Callable[[], Boosted]] = {
    "LowLevelZero": _low_level_zero,
    "Gemini": gemini,
    "FSDP, one unit": lambda: fsdp("one unit in BF16"),
    "FSDP, blocks": lambda: fsdp("blocks in BF16"),
}


def learn(run: Boosted, tensor_parallel: int = 1) -> list[float]:
    """The losses of all steps, over all ranks, which together read what one process reads."""
    ranks, rank = dist.get_world_size() // tensor_parallel, dist.get_rank() // tensor_parallel
    losses = []
    for number, (tokens,) in enumerate(batches(0, STEPS, ranks, rank)):
        for group in run.optimizer.param_groups:
            group["lr"] = SCHEDULE.rate(number + 1)
        loss = torch.tensor(run.step(tokens)[0])
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    return losses


@ranks(2)
@pytest.mark.parametrize("name", RUNS)
def test_the_loss_of_a_plugin_follows_one_process_in_fp8(name: str) -> None:
    assert_close_over_steps(learn(RUNS[name]()), alone(2))

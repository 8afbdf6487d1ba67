"""Checkpoints that some ranks write and another number of ranks reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.colossal.models import token_batch
from tests.colossal.zero.runs import masters
from tests.plugins import ddp_checks, gemini_runs, hybrid_runs, training
from tests.plugins.hybrid_checkpoint_checks import save, states_in, weights_in
from tests.plugins.registry import check_each, shared_folder
from tests.plugins.training import Boosted, assert_close, assert_equal

MODES: dict[str, Callable[[], Boosted]] = {
    "LowLevelZero": lambda: training.boost(training.ours(stage=2, use_fp8=True)),
    "Gemini": lambda: gemini_runs.boost(gemini_runs.wire()),
    "HybridParallel": lambda: hybrid_runs.start(hybrid_runs.fp8({"zero_stage": 1}), lr=1e-2),
    "DDP": lambda: training.boost(ddp_checks.fp8()),
}

WITH_MASTERS = ("LowLevelZero", "HybridParallel")
"""Those whose FP32 masters have files of their own, which are divided anew."""


def _steps(run: Boosted, count: int) -> list[float]:
    """Losses of steps on the batches that all ranks read alike, so that their number changes rounding alone."""
    return [run.step(token_batch(seed=number, batch=4))[0] for number in range(count)]


def _kept(folder: Path) -> Path:
    return folder / "losses.pt"


@check_each(*MODES)
def written(mode: str) -> None:
    run = MODES[mode]()
    _steps(run, 2)
    folder = save(run, "one file", mode)[0].parent
    if mode in WITH_MASTERS:
        from fp8booster.colossal.zero.master_weights import save_master_weights

        save_master_weights(run.model.unwrap(), run.optimizer, folder)
        torch.save(masters(run), folder / "masters.pt")
    torch.save(_steps(run, 3), _kept(folder))


@check_each(*MODES)
def read(mode: str) -> None:
    """What other ranks wrote is what these hold, and train on with."""
    folder = shared_folder(mode)
    model, optimizer = folder / "model.bin", folder / "optimizer.bin"
    run = MODES[mode]()
    _steps(run, 1)  # other weights, and FP8 copies of them
    run.booster.load_model(run.model, str(model))
    run.booster.load_optimizer(run.optimizer, str(optimizer))
    again: Any = save(run, "one file", f"{mode}, again")
    assert_equal(weights_in(model), weights_in(again[0]))
    expected = states_in(optimizer)
    assert expected
    assert_equal(expected, states_in(again[1]))
    if mode in WITH_MASTERS:
        from fp8booster.colossal.zero.master_weights import load_master_weights

        expected = torch.load(folder / "masters.pt")
        assert any(not torch.equal(value, masters(run)[name]) for name, value in expected.items())
        load_master_weights(run.model.unwrap(), run.optimizer, folder)
        assert_equal(expected, masters(run))
    assert_close(torch.load(_kept(folder)), _steps(run, 3), 5e-3)

"""What one and four gloo ranks write, two read and train on with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.hybrid.test_checkpoints import save, states_in, weights_in
from tests.colossal.models import token_batch
from tests.colossal.zero.runs import masters
from tests.distributed import on_ranks
from tests.plugins import test_torch_ddp, training
from tests.plugins.training import Boosted, assert_close, assert_equal

MODES: dict[str, Callable[[], Boosted]] = {
    "LowLevelZero": lambda: training.boost(training.ours(stage=2, use_fp8=True)),
    "Gemini": lambda: gemini_runs.boost(gemini_runs.wire()),
    "HybridParallel": lambda: hybrid_runs.start(hybrid_runs.fp8({"zero_stage": 1}), lr=1e-2),
    "DDP": lambda: training.boost(test_torch_ddp.fp8()),
}

WITH_MASTERS = ("LowLevelZero", "HybridParallel")
"""Those whose FP32 masters have files of their own, which are divided anew."""


def _steps(run: Boosted, count: int) -> list[float]:
    """Losses of steps on the batches that all ranks read alike, so that their number changes rounding alone."""
    return [run.step(token_batch(seed=number, batch=4))[0] for number in range(count)]


def written(mode: str, folder: Path) -> None:
    run = MODES[mode]()
    _steps(run, 2)
    save(run, "one file", folder)
    if mode in WITH_MASTERS:
        from fp8booster.colossal.zero.master_weights import save_master_weights

        save_master_weights(run.model.unwrap(), run.optimizer, folder)
        torch.save(masters(run), folder / "masters.pt")
    torch.save(_steps(run, 3), folder / "losses.pt")


def read(mode: str, folder: Path) -> None:
    """What other ranks wrote is what these hold, and train on with."""
    model, optimizer = folder / "model.bin", folder / "optimizer.bin"
    run = MODES[mode]()
    _steps(run, 1)  # other weights, and FP8 copies of them
    run.booster.load_model(run.model, str(model))
    run.booster.load_optimizer(run.optimizer, str(optimizer))
    again: Any = save(run, "one file", folder / "again")
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
    assert_close(torch.load(folder / "losses.pt"), _steps(run, 3), 5e-3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("writers", [1, 4])
def test_two_ranks_train_on_with_what_others_wrote(writers: int, mode: str, tmp_path: Path) -> None:
    on_ranks(writers, written, mode=mode, folder=tmp_path)
    on_ranks(2, read, mode=mode, folder=tmp_path)

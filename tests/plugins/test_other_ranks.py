"""What one and four gloo ranks write, two read and train on with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster.optim import AdamW
from tests.colossal.gemini import runs as gemini_runs
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.hybrid.test_checkpoints import save, states_in, weights_in
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.zero.runs import masters, names
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


def keep(value: object, file: Path) -> None:
    """Save what all ranks hold."""
    if dist.get_rank() == 0:
        torch.save(value, file)


def written(mode: str, folder: Path) -> None:
    run = MODES[mode]()
    _steps(run, 2)
    save(run, "one file", folder)
    if mode in WITH_MASTERS:
        from fp8booster.colossal.zero.rank_files import save_master_weights

        save_master_weights(run.model.unwrap(), run.optimizer, folder)
        keep(masters(run), folder / "masters.pt")
    keep(_steps(run, 3), folder / "losses.pt")


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
        from fp8booster.colossal.zero.rank_files import load_master_weights

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


def moments(run: Boosted) -> dict[str, torch.Tensor]:
    """Both moments, whole, by name."""
    whole = {}
    for name, working in names(run).items():
        state = run.optimizer.optim.state[run.optimizer.get_working_to_master_map()[id(working)]]
        for moment in ("exp_avg", "exp_avg_sq"):
            shards = [torch.empty_like(state[moment]) for _ in range(dist.get_world_size())]
            dist.all_gather(shards, state[moment].contiguous())
            whole[f"{name}:{moment}"] = torch.cat(shards)[: working.numel()]
    return whole


def write_moments(folder: Path) -> None:
    from fp8booster.colossal.zero.rank_files import save_moments

    run = training.boost(training.ours(stage=2, use_fp8=True), optimizer=AdamW)
    _steps(run, 2)
    save_moments(run.model.unwrap(), run.optimizer, folder)
    keep(moments(run), folder / "moments.pt")


def read_moments(folder: Path, optimizer: type[torch.optim.Optimizer], exact: bool) -> None:
    from fp8booster.colossal.zero.rank_files import load_moments

    run = training.boost(training.ours(stage=2, use_fp8=True), optimizer=optimizer)
    load_moments(run.model.unwrap(), run.optimizer, folder)
    expected, found = torch.load(folder / "moments.pt"), moments(run)
    assert expected
    if exact:
        assert_equal(expected, found)
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 0.02, name
    assert {int(state["step"]) for state in run.optimizer.optim.state.values()} == {2}
    _steps(run, 1)


@pytest.mark.parametrize("optimizer", [AdamW, torch.optim.AdamW])
@pytest.mark.parametrize("writers", [1, 2])
def test_codes_of_moments_are_read_by_other_ranks_and_by_torchs_adamw(writers, optimizer, tmp_path: Path) -> None:
    on_ranks(writers, write_moments, folder=tmp_path)
    on_ranks(2, read_moments, folder=tmp_path, optimizer=optimizer, exact=writers == 2 or optimizer is not AdamW)


def test_codes_of_another_model_of_no_rank_or_cut_short_are_refused(tmp_path: Path) -> None:
    on_ranks(2, write_moments, folder=tmp_path)
    on_ranks(2, refused_moments, folder=tmp_path)


def refused_moments(folder: Path) -> None:
    from fp8booster.colossal.zero.rank_files import load_moments

    wider = training.boost(training.ours(stage=2), tiny_llama(intermediate_size=192), optimizer=AdamW)
    with pytest.raises(ValueError, match="belongs to another model or run"):
        load_moments(wider.model.unwrap(), wider.optimizer, folder)
    with pytest.raises(FileNotFoundError, match="0 of 0 files of moments; copy the whole checkpoint"):
        load_moments(wider.model.unwrap(), wider.optimizer, folder / "nowhere")
    dist.barrier()  # the other rank has read the whole file
    if dist.get_rank() == 0:
        file = folder / "rank-00001-of-00002.safetensors"
        os.truncate(file, file.stat().st_size // 2)
    dist.barrier()
    with pytest.raises(ValueError, match=r"rank-00001-of-00002.safetensors is damaged or no file of tensors; copy"):
        load_moments(wider.model.unwrap(), wider.optimizer, folder)


@pytest.mark.parametrize("how", [{"stage": 2}, {"stage": 1, "master_weights": False}], ids=["FP32", "BF16 and 16 bits"])
def test_codes_go_on_bit_for_bit(how: dict[str, Any], tmp_path: Path) -> None:
    on_ranks(2, go_on, folder=tmp_path, how=how)


def go_on(folder: Path, how: dict[str, Any]) -> None:
    from fp8booster.colossal.zero.rank_files import load_master_weights, load_moments, save_master_weights, save_moments

    whole, resumed = (training.boost(training.ours(use_fp8=True, **how), optimizer=AdamW) for _ in range(2))
    _steps(whole, 2)
    for save_files, kind in ((save_master_weights, "masters"), (save_moments, "moments")):
        (folder / kind).mkdir(exist_ok=True)
        save_files(whole.model.unwrap(), whole.optimizer, folder / kind)
    dist.barrier()
    resumed.model.unwrap().load_state_dict(whole.model.unwrap().state_dict())
    load_moments(resumed.model.unwrap(), resumed.optimizer, folder / "moments")
    load_master_weights(resumed.model.unwrap(), resumed.optimizer, folder / "masters")
    assert _steps(whole, 3) == _steps(resumed, 3)
    assert_equal(masters(whole), masters(resumed))

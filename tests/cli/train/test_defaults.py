from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.options import TrainOptions
from fp8booster.files import cache_folder
from fp8booster.training.models import MODELS, SIZES


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize("gpus", [0, 4])
def test_every_size_gets_all_its_settings_on_every_machine(monkeypatch, model, gpus):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    options = resolve(TrainOptions(model=model), launched=False)
    assert options.nproc == (gpus or 2)
    assert options.vocabulary == MODELS[model].vocabulary
    assert options.sequence <= MODELS[model].sequence
    assert 0 < options.min_lr < options.lr
    assert 0 < options.warmup < options.decay == options.steps
    assert options.out.startswith(f"runs/{model}-compare-")


@pytest.mark.parametrize(("gpus", "longest"), [(0, 128), (4, 2048)])
@pytest.mark.parametrize("positions", [100, 4096])
def test_a_folder_s_model_gets_sequences_that_it_has_positions_for(monkeypatch, tmp_path, gpus, longest, positions):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    LlamaConfig(vocab_size=320, max_position_embeddings=positions).save_pretrained(tmp_path)
    assert resolve(TrainOptions(model=str(tmp_path)), launched=False).sequence == min(longest, positions)


def test_what_is_given_stays():
    options = resolve(TrainOptions(steps=30, warmup=0, lr=1.0, out="here", nproc=3), launched=False)
    assert (options.steps, options.warmup, options.decay, options.min_lr) == (30, 0, 30, 0.1)
    assert (options.out, options.nproc) == ("here", 3)


def test_the_cache_lies_where_the_user_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fp8booster"


def test_launched_processes_need_a_common_folder():
    with pytest.raises(ValueError, match="give it with --out"):
        resolve(TrainOptions(), launched=True)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="--nproc is 2 and this machine has 1 GPUs"):
        resolve(TrainOptions(nproc=2), launched=False)

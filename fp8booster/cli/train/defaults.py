"""The values of the options that depend on the model and on the machine."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import NamedTuple

import torch

from fp8booster.files import cache_folder
from fp8booster.training.models import MODELS

from .model_folder import folder_config, is_folder
from .options import TrainOptions

CPU_PROCESSES = 2
"""Processes on a machine without a GPU: the fewest that communicate."""


class Recipe(NamedTuple):
    """Settings of one kind of run where the user says nothing."""

    steps: int
    batch: int
    sequence: int
    lr: float


# On CPU, sized for two cores: FP8 products run at about 50 GFLOP/s a core there.
_CPU = Recipe(steps=200, batch=8, sequence=128, lr=1e-3)
_GPU = {
    "tiny": Recipe(steps=500, batch=32, sequence=512, lr=2e-3),
    "100m": Recipe(steps=500, batch=8, sequence=2048, lr=6e-4),
    "1b": Recipe(steps=300, batch=4, sequence=4096, lr=3e-4),
    "7b": Recipe(steps=200, batch=2, sequence=4096, lr=3e-4),
    "13b": Recipe(steps=200, batch=1, sequence=4096, lr=3e-4),
    "30b": Recipe(steps=200, batch=1, sequence=2048, lr=1.5e-4),
    "70b": Recipe(steps=200, batch=1, sequence=4096, lr=1.5e-4),
    "qwen2.5-7b": Recipe(steps=200, batch=1, sequence=4096, lr=3e-4),
}
_GPU_FOLDER = Recipe(steps=200, batch=1, sequence=2048, lr=1e-4)
_FOLDER_VOCABULARY = 32000


def recipe_of(model: str, on_gpu: bool) -> Recipe:
    """Return the settings of a model on GPUs, or on CPUs, with sequences as long as a folder's model takes them."""
    if not is_folder(model):
        return _GPU[model] if on_gpu else _CPU
    recipe = _GPU_FOLDER if on_gpu else _CPU
    positions = getattr(folder_config(model), "max_position_embeddings", recipe.sequence)
    return recipe._replace(sequence=min(recipe.sequence, positions))


def resolve(options: TrainOptions, launched: bool) -> TrainOptions:
    """Return `options` with every field set; `launched`: under torchrun, which brings the processes and needs `--out`.

    Raises ValueError when the model is unknown, when launched processes are given no common folder, and for more
    processes than GPUs.
    """
    from_folder = is_folder(options.model)
    recipe = recipe_of(options.model, on_gpu=torch.cuda.is_available())
    processes = torch.cuda.device_count() if torch.cuda.is_available() else CPU_PROCESSES
    if options.out is None and launched:
        raise ValueError("Under torchrun the processes need one folder for the run: give it with --out.")

    if torch.cuda.is_available() and not launched and (options.nproc or 0) > processes:
        raise ValueError(f"--nproc is {options.nproc} and this machine has {processes} GPUs; give at most that many.")

    steps = options.steps or recipe.steps
    lr = options.lr or recipe.lr
    if from_folder:
        vocabulary = min(_FOLDER_VOCABULARY, folder_config(options.model).vocab_size)
    else:
        vocabulary = MODELS[options.model].vocabulary
    values = {
        **recipe._asdict(),
        "warmup": max(1, steps // 10),
        "decay": steps,
        "min_lr": lr / 10,
        "vocabulary": vocabulary,
        "nproc": processes,
        "cache": str(cache_folder()),
        # the time, so that a run that is started again does not write over the one before
        "out": f"runs/{Path(options.model).name}-{options.precision}-{time.strftime('%Y%m%d-%H%M%S')}",
    }
    missing = {name: value for name, value in values.items() if getattr(options, name) is None}
    return dataclasses.replace(options, **missing)

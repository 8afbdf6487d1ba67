"""Ways to train the same small model: a plain loop, the Trainer, Accelerate, TRL's SFTTrainer; on ranks FSDP2, ZeRO."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_by_torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from fp8booster import FP8Config, fully_shard
from fp8booster.cli.train.data import train_tokenizer
from fp8booster.hf import FP8Callback, prepare
from tests.colossal.models import VOCABULARY, tiny_llama

STEPS, SAVED = 5, 3
"""Steps of a run, and after which of them it saves."""

RATE, BATCH, LENGTH = 3e-3, 4, 32

WITH_TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")

ALWAYS = FP8Config(always=True)
"""The model is so small that no layer would compute in FP8 otherwise."""


@dataclass
class Run:
    """A run, or the rest of one that was resumed."""

    losses: list[float]  # of each step
    evaluation: float  # the mean loss of the samples for evaluation, after the last step
    model: nn.Module
    last: Path  # a folder of save_pretrained, of the model after the last step


Samples = list[dict[str, list[int]]]


def samples(count: int, seed: int = 0) -> Samples:
    """Rows of numbers that count upwards, from random beginnings."""
    starts = torch.randint(0, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    rows = ((starts + torch.arange(LENGTH)) % VOCABULARY).tolist()
    return [{"input_ids": row, "labels": row} for row in rows]


def batches(rows: Samples) -> DataLoader:
    """Batches of both columns, in order."""
    columns = [{name: torch.tensor(row) for name, row in each.items()} for each in rows]
    return DataLoader(columns, batch_size=BATCH)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the mean loss of the samples for evaluation, under autocast as all ways run it."""
    model.eval()
    with torch.autocast("cpu", torch.bfloat16):
        losses = [model(**batch).loss.float() for batch in batches(EVALUATED)]
    model.train()
    return torch.stack(losses).mean().item()


TRAINED, EVALUATED = samples(STEPS * BATCH), samples(2 * BATCH, seed=1)


def plain(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train by a loop of PyTorch."""
    model = tiny_llama()
    if config is not None:
        model = prepare(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    done = 0
    if resume:
        saved = torch.load(folder / "saved.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = SAVED
    losses = []
    model.train()
    for step, batch in enumerate(batches(TRAINED), 1):
        if step <= done:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == SAVED and not resume:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
    model.save_pretrained(folder / "last")
    return Run(losses, evaluate(model), model, folder / "last")


def accelerate(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train by a loop with an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny_llama()
    if config is not None:
        model = prepare(model, config, accelerator=accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    rows = samples(STEPS * BATCH * accelerator.num_processes)  # accelerate spreads batches over ranks
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(rows))
    done = 0
    if resume:
        accelerator.load_state(folder / "saved")
        done = SAVED
        loader = accelerator.skip_first_batches(loader, done)
    losses = []
    model.train()
    for step, batch in enumerate(loader, done + 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == SAVED and not resume:
            accelerator.save_state(folder / "saved")
    evaluation = evaluate(model)
    state = accelerator.get_state_dict(model)
    model = accelerator.unwrap_model(model)
    model.save_pretrained(folder / "last", state_dict=state, is_main_process=accelerator.is_main_process)
    return Run(losses, evaluation, model, folder / "last")


def arguments(kind: type[TrainingArguments], folder: Path, **more: Any) -> TrainingArguments:
    """Return a Trainer's arguments for these steps."""
    settings = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 1,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "bf16": True,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "average_tokens_across_devices": False,
    }
    return kind(**settings | more)


def callbacks(config: FP8Config | None) -> list[FP8Callback]:
    """Return what turns FP8 on in a Trainer."""
    return [] if config is None else [FP8Callback(config)]


def run_trainer(trainer: Trainer, folder: Path, resume: bool) -> Run:
    """Train, evaluate and save."""
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
    evaluation = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / "last"))
    return Run(losses[SAVED:] if resume else losses, evaluation, trainer.model, folder / "last")


def trainer(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train by transformers' Trainer."""
    made = Trainer(
        tiny_llama(),
        arguments(TrainingArguments, folder),
        train_dataset=TRAINED,
        eval_dataset=EVALUATED,
        callbacks=callbacks(config),
    )
    return run_trainer(made, folder, resume)


def sft(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train by TRL's SFTTrainer, on rows of tokens."""
    import trl
    from datasets import Dataset

    made = trl.SFTTrainer(
        tiny_llama(),
        arguments(trl.SFTConfig, folder, max_length=LENGTH),
        train_dataset=Dataset.from_list(TRAINED),
        eval_dataset=Dataset.from_list(EVALUATED),
        processing_class=tokenizer(folder),
        callbacks=callbacks(config),
    )
    return run_trainer(made, folder, resume)


def tokenizer(folder: Path) -> Any:
    """Return a small tokenizer, which TRL asks for; each rank writes its own into the folder of a run."""
    own = folder / f"tokenizer-{dist.get_rank() if dist.is_initialized() else 0}"
    train_tokenizer(["one two three"], 300, own)
    return AutoTokenizer.from_pretrained(own)


WAYS: dict[str, Callable[[Path, FP8Config | None, bool], Run]] = {
    "plain": plain,
    "Trainer": trainer,
    "Accelerate": accelerate,
    "SFTTrainer": sft,
}


def fsdp2(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train on ranks by FSDP2."""
    model = tiny_llama()
    if config is None:
        for unit in (*model.model.layers, model):
            shard_by_torch(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    else:
        fully_shard(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    if resume:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder / "saved")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    losses = []
    model.train()
    for step, batch in of_rank(SAVED if resume else 0):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
        if step == SAVED and not resume:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=folder / "saved")
    whole = whole_state(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "last", state_dict=whole)
    dist.barrier()
    return Run(losses, evaluate(model), model, folder / "last")


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of a model that FSDP2 has sharded, whole, on each rank."""
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def zero(folder: Path, config: FP8Config | None, resume: bool) -> Run:
    """Train on ranks by LowLevelZeroPlugin."""
    from colossalai.booster import Booster

    from fp8booster.plugins import LowLevelZeroPlugin

    in_fp8 = {} if config is None else {"use_fp8": True, "fp8_config": config}
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2, precision="bf16", **in_fp8))
    model = tiny_llama()
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=RATE))
    if resume:
        booster.load_model(model, str(folder / "saved"))
        booster.load_optimizer(optimizer, str(folder / "saved-optimizer"))
    losses = []
    model.train()
    for step, batch in of_rank(SAVED if resume else 0):
        loss = model(**batch).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss))
        if step == SAVED and not resume:
            booster.save_model(model, str(folder / "saved"), shard=True, use_safetensors=True)
            booster.save_optimizer(optimizer, str(folder / "saved-optimizer"), shard=True)
    booster.save_model(model, str(folder / "last"), shard=True, use_safetensors=True)
    dist.barrier()
    return Run(losses, evaluate(model), model.unwrap(), folder / "last")


def of_rank(done: int) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """Yield the rank's part of the batch of each step that is not done yet, after its number."""
    for step, batch in enumerate(batches(TRAINED), 1):
        if step > done:
            yield step, {name: rows[dist.get_rank() :: dist.get_world_size()] for name, rows in batch.items()}


def mean(loss: torch.Tensor) -> float:
    """Return the mean of the losses of all ranks."""
    total = loss.detach().float().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


LIBRARIES = ["Trainer", "Accelerate", pytest.param("SFTTrainer", marks=WITH_TRL)]
"""Ways that wrap the model themselves, and so run on ranks too."""

ON_RANKS: dict[str, Callable[[Path, FP8Config | None, bool], Run]] = {"FSDP2": fsdp2, "ZeRO": zero}


def run(way: str, folder: Path, config: FP8Config | None, resume: bool = False) -> Run:
    """Train in one of the ways, on CPUs."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder.mkdir(exist_ok=True)
    set_seed(0)
    return {**WAYS, **ON_RANKS}[way](folder, config, resume)

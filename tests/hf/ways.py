"""Ways to train the same small model: a plain loop, the Trainer, Accelerate, and TRL's SFTTrainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed

from fp8booster import FP8Config
from fp8booster.hf import FP8Callback, prepare
from tests.colossal.models import VOCABULARY, tiny_llama

STEPS, SAVED = 5, 3
"""Steps of a run, and after which of them it saves."""

RATE, BATCH, LENGTH = 3e-3, 4, 32

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
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches(TRAINED))
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
        processing_class=AutoTokenizer.from_pretrained(folder.parent / "tokenizer"),
        callbacks=callbacks(config),
    )
    return run_trainer(made, folder, resume)


WAYS: dict[str, Callable[[Path, FP8Config | None, bool], Run]] = {
    "plain": plain,
    "Trainer": trainer,
    "Accelerate": accelerate,
    "SFTTrainer": sft,
}


def run(way: str, folder: Path, config: FP8Config | None, resume: bool = False) -> Run:
    """Train in one of the ways, in a process without an accelerator."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    folder.mkdir(exist_ok=True)
    set_seed(0)
    return WAYS[way](folder, config, resume)

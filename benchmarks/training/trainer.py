"""transformers' Trainer on one GPU, in BF16 and with fp8booster's callback, a step whenever it is asked for one."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.training.built_engine import BuiltEngine
from benchmarks.training.data import batches
from benchmarks.training.job import Job
from benchmarks.training.plain import in_fp32, require_one_process
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.hf import FP8Callback
from fp8booster.training.batches import Replica
from fp8booster.training.optimizers import make_optimizer

_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables by which the Trainer would take one process for one of several, and wrap the model in DDP."""

_IGNORED = -100
"""A label that is none, for transformers."""

_NEVER_LAST = 1 << 40
"""Steps of a Trainer that is told to go on as long as it is asked for more."""


def trainer(job: Job, device: torch.device, *, use_fp8: bool) -> BuiltEngine:
    """A Trainer with `bf16=True`: weights in FP32, autocast, its own loop, clipping and loading of data.

    Args:
        job: what to train; its plugin and parallel sizes are not used.
        device: of this rank.
        use_fp8: with `FP8Callback`.

    Raises:
        ValueError: more than one process.
    """
    require_one_process("--precision trainer, or --against trainer,")
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=job.micro_batch,
        gradient_accumulation_steps=job.micro_batches,
        max_steps=_NEVER_LAST,
        lr_scheduler_type="constant",  # `measure` sets the rate of each step
        max_grad_norm=job.max_norm,
        bf16=True,
        use_cpu=device.type == "cpu",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    model = in_fp32(job, device)
    optimizer = make_optimizer(job.optimizer if use_fp8 else "adamw", model.parameters(), lr=job.lr)
    turns = _Turns()
    engine = _KeepsLosses(
        model,
        arguments,
        train_dataset=_Rows(batches(job, Replica(0, 1), torch.device("cpu"))),
        callbacks=[turns, *([FP8Callback(fp8_config(job.fp8_options))] if use_fp8 else [])],
        optimizers=(optimizer, None),
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        # the Trainer loads its tokens itself, ahead of the step: they are the same
        turns.take(engine.train)
        return engine.losses_of_step()

    return BuiltEngine(model=model, optimizer=optimizer, step=step, replica=Replica(0, 1))


class _Rows(IterableDataset):
    """Sequences of one step after the other, as long as they are asked for."""

    def __init__(self, feed: Callable[[int], torch.Tensor]) -> None:
        self._feed = feed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        step = 0
        while True:
            for row in self._feed(step):
                labels = row.clone()
                labels[0] = _IGNORED  # nothing predicts it, and the Trainer divides by the number of labels
                yield {"input_ids": row, "labels": labels}
            step += 1


class _KeepsLosses(Trainer):
    """A Trainer that tells the loss of a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._losses: list[torch.Tensor] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's, which returns the loss of a micro-batch, divided by their number."""
        self._losses.append(super().training_step(*args, **kwargs))
        return self._losses[-1]

    def losses_of_step(self) -> torch.Tensor:
        """Return the mean loss of the step that has ended."""
        losses, self._losses = self._losses, []
        return torch.stack(losses).sum()


class _Turns(TrainerCallback):
    """Lets a Trainer on a thread of its own take a step, and wait."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[None] = SimpleQueue()
        self._taken: SimpleQueue[BaseException | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, train: Callable[[], Any]) -> None:
        """Let `train`, which is called at the first step, take one; raise what it raises."""
        if self._thread is None:
            # the Trainer's loop is its own: what measures steps is on this side of it
            self._thread = threading.Thread(target=self._run, args=(train,), daemon=True)
            self._thread.start()
        self._asked.put(None)
        error = self._taken.get()
        if error is not None:
            raise error

    def _run(self, train: Callable[[], Any]) -> None:
        try:
            train()
        except BaseException as error:
            self._taken.put(error)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait until a step is asked for."""
        self._asked.get()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Tell that it is taken."""
        self._taken.put(None)

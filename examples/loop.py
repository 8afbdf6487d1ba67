"""The loop of both examples: steps, checkpoints that are whole or not there, resuming, and a stop that saves."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from modes import learning_rate, train_step

import torch  # isort: skip  (after modes, which imports fp8booster)
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch.utils.data import DataLoader

from fp8booster.checkpoints import checkpoints_in, new_checkpoint
from fp8booster.manifest import what_is_broken

KEPT = 2
"""Checkpoints that stay: where the newest turns out to be broken, the one before is left."""


def train_and_save(
    args: argparse.Namespace,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    loader: DataLoader,
    save_config: Callable[[Path], object],
) -> list[float]:
    """Train to the last step, or until SIGTERM; save on the way as the arguments say, and at the end.

    Args:
        save_config: writes to a folder what transformers wants beside the weights; rank 0 calls it.

    Returns:
        the loss of each step.
    """
    out = Path(args.out)
    done = load(find_checkpoint(out), booster, model, optimizer) if args.resume else 0
    losses = []
    batches = endless(loader, skip=done)
    with stop_on_sigterm() as wanted:
        for step in range(done, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(args, step)
            losses.append(train_step(args, booster, model, optimizer, next(batches)))
            stopped = on_any_rank(wanted())
            if dist.get_rank() == 0:
                print(f"step {step + 1}/{args.steps}  loss {losses[-1]:.4f}", flush=True)
            due = args.save_every and (step + 1) % args.save_every == 0
            if due or stopped or step + 1 == args.steps:
                save(out, step + 1, booster, model, optimizer, save_config)
            if stopped:
                if dist.get_rank() == 0:
                    print(f"stopped by SIGTERM; go on from step {step + 1} with --resume", flush=True)
                break
    return losses


def save(
    out: Path,
    step: int,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    save_config: Callable[[Path], object],
) -> None:
    """Write the checkpoint of a step; a kill on the way leaves the former ones as they were. Every rank calls it."""
    with new_checkpoint(out, step, keep=KEPT) as folder:
        booster.save_model(model, str(folder / "model"), shard=True, use_safetensors=True)
        booster.save_optimizer(optimizer, str(folder / "optimizer"), shard=True)
        if dist.get_rank() == 0:
            save_config(folder / "model")
            (folder / "state.json").write_text(json.dumps({"step": step}))


def load(checkpoint: Path, booster: Booster, model: ModelWrapper, optimizer: OptimizerWrapper) -> int:
    """Set model and optimizer to a checkpoint's; returns its step. Every rank calls it."""
    booster.load_model(model, str(checkpoint / "model"))
    booster.load_optimizer(optimizer, str(checkpoint / "optimizer"))
    return json.loads((checkpoint / "state.json").read_text())["step"]


def find_checkpoint(out: Path) -> Path:
    """The newest checkpoint whose files are those that were saved together; rank 0 looks, and says what it passes over.

    Raises:
        ValueError: there is none.
    """
    found: list[str | None] = [None, None]  # the checkpoint, or why there is none
    if dist.get_rank() == 0:
        faults = []
        for checkpoint in reversed(checkpoints_in(out)):
            fault = what_is_broken(checkpoint)
            if fault is None:
                print(f"going on from {checkpoint}", flush=True)
                found[0] = str(checkpoint)
                break
            print(f"{fault}; it is passed over", flush=True)
            faults.append(fault)
        found[1] = "; ".join(faults)
    dist.broadcast_object_list(found)
    if found[0] is None:
        raise ValueError(f"{found[1]}; no checkpoint in {out} is whole, so give another --out")
    return Path(found[0])


@contextmanager
def stop_on_sigterm() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM, as SLURM and torchrun send it, instead of dying of it; gives what tells whether it came."""
    came = []
    former = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, former)


def on_any_rank(wanted: bool) -> bool:
    """Whether one rank wants it: a signal reaches ranks in different steps, and all must save the same one."""
    wants = torch.tensor(float(wanted), device=get_accelerator().get_current_device())
    dist.all_reduce(wants, dist.ReduceOp.MAX)
    return bool(wants.item())


def endless(loader: DataLoader, skip: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches, epoch after epoch, in an order that depends on the epoch alone; the first `skip` are left out."""
    epoch, taken = 0, 0
    while True:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            taken += 1
            if taken > skip:
                yield batch
        if taken == 0:
            raise ValueError("the data does not fill one batch; give more, or a smaller --batch or --sequence")
        epoch += 1

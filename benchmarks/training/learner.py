"""One rank of one run of a campaign: `python -m benchmarks.training.learner` serves them, as `worker` serves turns.

A run of a small model is bound by Python, so a step does nothing but train: losses stay on the GPU for `BLOCK` steps.
"""

from __future__ import annotations

import copy
import faulthandler
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.built_engine import BuiltEngine
from benchmarks.training.data import batches, first_read, held_out, of_kind
from benchmarks.training.engines import ENGINES
from benchmarks.training.host import serve
from benchmarks.training.job import Job
from benchmarks.training.runs import HELD_OUT, NOT_FINITE, RunFolder
from benchmarks.training.variants import BF16
from benchmarks.training.worker import PRELOADED, cuda_begins_in_a_fork, facts_of, reason_of
from fp8booster import convert_to_fp8, fuse
from fp8booster.checkpoints import named_step, new_checkpoint, newest_checkpoint
from fp8booster.cli.train.checkpoints import load_random_state, save_random_state
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.nn.recording import Recording, record
from fp8booster.training.models import build
from fp8booster.training.optimizers import WarmupCosine

BLOCK = 10
"""Steps between waits for the device, lines of the record and looks at the clock."""


def learn(task: dict[str, Any]) -> None:
    """Train from where the run stands to its last step and evaluate, or save when it is `until`; every rank calls it.

    It saves and ends, too, when its folder has the file `stop`.

    Args:
        task: "engine", "job" and "folder" of the run; "until", in seconds since the epoch, when to save and end;
            "saves", whether it is saved before it evaluates, too; "limit_s", after which a collective has failed.
    """
    # recorded from here on, in the run's folder, and not by the engine
    job = replace(given := Job.from_record(task["job"]), record=0)
    make = ENGINES[task["engine"]].load()
    cuda = job.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=task["limit_s"]))
    for _, options in job.forwards:  # what cannot run so is refused before the training, without memory for weights
        _in_fp8(build(job.architecture.config(job.sequence), device=torch.device("meta")), options)
    built = make(job, device)
    folder = RunFolder(Path(task["folder"]))
    records = given.record and facts_of(built.model)["layers"] is not None
    done = folder.resumes_at
    # before weights are loaded, which casts those of the next step
    recorded = record(built.model, every=given.record, sink=folder.scales, done=done) if records else nullcontext()
    with recorded as recording:
        ended = _train(built, job, folder, _resume(built, folder), task, device, recording)
    if ended:
        _finish(built, job, folder, device)


def _finish(built: BuiltEngine, job: Job, folder: RunFolder, device: torch.device) -> None:
    """Evaluate after the last step, and write how the run ended."""
    # no loss follows the last update, which may have made weights NaN
    found = evaluate(built, job, device) if built.boosted.is_finite() else {}
    # only as the run computes: that another way is not finite is a finding about that way
    finite = bool(found) and all(math.isfinite(losses["own"]) for losses in found.values())
    if dist.get_rank() != 0:
        return
    if finite:
        folder.finish(HELD_OUT, held_out=found.pop(HELD_OUT), kinds=found, **facts_of(built.model))
    else:
        folder.finish(NOT_FINITE, at_step=job.steps)


def _train(
    built: BuiltEngine,
    job: Job,
    folder: RunFolder,
    step: int,
    task: dict[str, Any],
    device: torch.device,
    recording: Recording | None,
) -> bool:
    """Train from a step on; returns whether to evaluate: else it was late, and is saved, or a loss was not finite."""
    first = dist.get_rank() == 0
    feed = batches(job, built.replica, device)
    schedule = WarmupCosine.over(job.steps, job.lr)
    a_step = job.micro_batches * job.micro_batch * job.sequence * built.replica.count
    while step < job.steps:
        losses: list[torch.Tensor] = []
        began = time.monotonic()  # an evaluation is not timed
        while True:
            for group in built.optimizer.param_groups:
                group["lr"] = schedule.rate(step + 1)
            losses.append(built.step(feed(step)))
            step += 1
            evaluates = job.evaluate_every and step % job.evaluate_every == 0 and step < job.steps
            if step % BLOCK == 0 or step == job.steps or evaluates:
                break
        values, late = _over_ranks(losses, time.time() >= task["until"] or folder.stop.exists(), device)
        finite = [value for value in values if math.isfinite(value)]
        line = {"step": step, "losses": finite, "tokens": len(values) * a_step, "seconds": time.monotonic() - began}
        if evaluates and len(finite) == len(values):
            line["texts"] = {name: _evaluated(built.model, text()) for name, text in texts_of(job, device).items()}
            built.model.train()
        if first:
            folder.append(**line)
        if len(finite) < len(values):
            if first:
                bad = next(index for index, value in enumerate(values) if not math.isfinite(value))
                folder.finish(NOT_FINITE, at_step=step - len(values) + bad + 1)
            return False
        # what follows the last step takes time too, in which a machine may go away
        if late or (step == job.steps and task["saves"]):
            # the checkpoint is of no use without the losses and the samples before it
            if recording is not None:
                recording.flush()
            if first:
                folder.sync()
            with new_checkpoint(folder.checkpoints, step, keep=1, finite=built.boosted.is_finite()) as place:
                built.boosted.save(place)
                save_random_state(built.boosted, place)
        if late:
            return False
    return True


def _resume(built: BuiltEngine, folder: RunFolder) -> int:
    """Load the newest checkpoint; returns the steps that are done."""
    checkpoint = newest_checkpoint(folder.checkpoints)
    step = 0
    if checkpoint is not None:
        built.boosted.load(checkpoint)
        load_random_state(built.boosted, checkpoint)
        step = named_step(checkpoint)
    if dist.get_rank() == 0:
        folder.cut(step)
    dist.barrier()
    return step


def _over_ranks(losses: list[torch.Tensor], late: bool, device: torch.device) -> tuple[list[float], bool]:
    """The mean over the ranks of each loss, and whether it is late on any: one wait for the device."""
    shared = torch.stack([*(loss.detach().double() for loss in losses), torch.tensor(float(late)).double().to(device)])
    dist.all_reduce(shared)
    *sums, lates = shared.tolist()
    return [value / dist.get_world_size() for value in sums], lates > 0


def evaluate(built: BuiltEngine, job: Job, device: torch.device) -> dict[str, dict[str, float]]:
    """The mean loss on what was held out, and on text of each other kind, by its name.

    "own" is as the run computes, "error" its standard error over the text, and "BF16" of its weights without FP8: the
    values of the masters, not those of FP8 copies. Those of `job.forwards` stand under their names.
    """
    built.boosted.gather_masters()
    trained, plain = built.boosted.model.unwrap(), build(job.architecture.config(job.sequence), device=device)
    plain.load_state_dict(trained.state_dict())
    for name, buffer in plain.named_buffers():  # ZeRO rounds the rotary frequencies, which are in no state dict
        buffer.data = trained.get_buffer(name).data
    ways = {BF16: plain} | {way: _in_fp8(plain, options) for way, options in job.forwards}
    return {
        name: _evaluated(built.model, text()) | {way: _evaluated(model, text())["own"] for way, model in ways.items()}
        for name, text in texts_of(job, device).items()
    }


def _in_fp8(plain: torch.nn.Module, options: tuple[str, ...]) -> torch.nn.Module:
    model = copy.deepcopy(plain)
    convert_to_fp8(model, fp8_config(options))
    fuse(model)
    return model


def texts_of(job: Job, device: torch.device) -> dict[str, Callable[[], Iterable[torch.Tensor]]]:
    """What is evaluated on, by its name: functions that give micro-batches."""
    kinds = {
        name: partial(first_read, job, device) if tokens == job.tokens else partial(of_kind, tokens, job, device)
        for name, tokens in job.kinds
    }
    return {HELD_OUT: partial(held_out, job, device), **kinds}


@torch.no_grad()
def _evaluated(model: torch.nn.Module, text: Iterable[torch.Tensor]) -> dict[str, float]:
    """The mean loss, and its standard error over micro-batches: NaN of one."""
    model.eval()
    losses = torch.stack([model(input_ids=tokens, labels=tokens).loss for tokens in text]).double()
    error = losses.std().item() / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    return {"own": losses.mean().item(), "error": error}


def do(task: dict[str, Any]) -> int:
    """Train, or write the reason why not into the file that the task names; returns the exit status."""
    warnings.filterwarnings("ignore", message="Please install")  # colossalai's advertisements
    try:
        learn(task)
    except BaseException as error:
        traceback.print_exception(error)
        Path(task["failed"]).write_text(reason_of(error))
        return 1
    return 0


if __name__ == "__main__":
    faulthandler.enable()
    serve(do, preload=PRELOADED, may_fork=cuda_begins_in_a_fork)

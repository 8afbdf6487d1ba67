"""The training loop of one rank: build, boost, step, record, save."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator

from fp8booster import record, report
from fp8booster.checkpoints import checkpoints_in, last_finite
from fp8booster.cli.metrics import MetricsLog, StepMetrics
from fp8booster.files import write_whole
from fp8booster.monitor.sinks import FILE
from fp8booster.monitor.traffic import Traffic, count_traffic
from fp8booster.nn.fused import fuse_model
from fp8booster.nn.fused.packing import why_not_packed
from fp8booster.nn.recording import Recording
from fp8booster.training.adapters import ALL_LINEAR, with_adapters
from fp8booster.training.batches import Batches
from fp8booster.training.boosted import BoostedModel, causal
from fp8booster.training.optimizers import WarmupCosine, make_optimizer
from fp8booster.training.plugins import FP32_WEIGHTS
from fp8booster.training.ranks import join_ranks, over_ranks

from .checkpoints import RunState, load_checkpoint, save_checkpoint, why_not_resumed, write_run_file
from .data import load_tokenizer
from .key_values import build_plugin, fp8_config
from .launch import Task
from .model_folder import build_model, is_folder, load_config
from .speed import ChipLimit

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig

_CPU = torch.device("cpu")

_BETAS = (0.9, 0.95)  # of LLaMA (Touvron et al., arXiv 2302.13971, section 2.3)


class NotFinite(ValueError):
    """The loss or the gradient norm is NaN or infinite; raised before the weights take the step."""


class _Skip(Exception):
    """A step is left out, on all ranks."""


Tell = Callable[..., None]
"""Gets an event, as `progress.Silent.show`."""


def train(task: Task, tell: Tell, stop_wanted: Callable[[], bool]) -> None:
    """Run a task on this rank until its last step, or until one rank is asked to stop; then save."""
    options = task.options
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS wants it before its first call
        torch.use_deterministic_algorithms(True)
    # Equal seeds: every rank draws the same initial weights, as ZeRO expects.
    join_ranks(task.precision, options.seed)
    with count_traffic() as traffic:
        Trainer(task, tell, stop_wanted, traffic).run()
    # not after an error: the others would report a lost connection before this rank reports its cause
    dist.destroy_process_group()


class Trainer:
    """One rank's model, optimizer, data and records."""

    def __init__(self, task: Task, tell: Tell, stop_wanted: Callable[[], bool], traffic: Traffic) -> None:
        self._task, self._options, self._tell = task, task.options, tell
        self._stop_wanted, self._traffic = stop_wanted, traffic
        options = task.options
        self._device = get_accelerator().get_current_device()
        self._schedule = WarmupCosine(peak=options.lr, floor=options.min_lr, warmup=options.warmup, decay=options.decay)
        self._global_batch = options.global_batch(dist.get_world_size())
        tell("status", text=f"building the model {options.model}")
        self._build()
        replica = self._boosted.replica
        # ranks that share a replica read the same tokens
        self._batches = Batches(task.tokens.open(), self._global_batch, replica.index, options.seed)
        self._step = self._position = 0
        self._began_good: str | None = None  # the checkpoint that the run resumed from
        if task.resume is not None:
            self._resume(task.resume)
        self._log: MetricsLog | None = None
        if dist.get_rank() == 0:
            task.result.unlink(missing_ok=True)  # of fewer steps
            self._log = MetricsLog(task.folder, self._step)
            if task.about:
                # not before: options that ranks cannot start with would stand in the way of the next resume
                write_run_file(options, task.about)
        self._recording: Recording | None = None
        if options.record and task.precision == "fp8":
            self._recording = record(
                self._boosted.model,
                every=options.record,
                sink=task.folder / FILE,
                done=self._step,
                on_warning=lambda text: tell("notice", text=text),
            )

    def _resume(self, checkpoint: str) -> None:
        self._tell("status", text=f"loading {checkpoint}")
        state = load_checkpoint(Path(checkpoint), self._task.tokens.identity, self._boosted, self._shapes, self._tied)
        self._step, self._position = state.step, state.position
        if self._boosted.is_finite():
            self._began_good = checkpoint
            return
        sentence = why_not_resumed(Path(checkpoint))  # an older version saved it, or somebody changed it
        if self._options.on_nonfinite != "warn":
            raise ValueError(sentence)
        self._notice(sentence)

    def run(self) -> None:
        """Step until done, stopped or not finite. Raises NotFinite with a sentence in the last case."""
        with nullcontext() if self._recording is None else self._recording, self._limit:
            self._run()

    def _run(self) -> None:
        self._tell("start", done=self._step, steps=self._options.steps)
        saved = self._step
        stopped = False
        while self._step < self._options.steps and not stopped:
            try:
                stopped = self._take_step()
            except NotFinite as error:
                raise NotFinite(f"{error} {self._keep_last_good(saved)}") from None
            due = self._options.save and self._step % self._options.save == 0
            due = (due or stopped or self._step == self._options.steps) and not self._task.trial
            if due and self._save(stopped):
                saved = self._step
        if self._step == self._options.steps:
            self._write_result()
            self._tell("done")
        if self._log is not None:
            self._log.close()

    def _build(self) -> None:
        options, tokens = self._options, self._task.tokens
        vocabulary = tokens.vocabulary if is_folder(options.model) else options.vocabulary
        self._config = load_config(options.model, vocabulary, options.sequence)
        # DDP and FSDP train the weights that they are given, and compute in BF16 by themselves
        dtype = torch.float32 if options.plugin in FP32_WEIGHTS else torch.bfloat16
        config = copy.deepcopy(self._config)  # a checkpoint gets it without what shardformer divides among ranks
        if options.lora is None:
            network = build_model(options.model, config, self._device, options.recomputed, dtype)
        else:
            network = self._with_adapters(config)
        self._parameters = sum(parameter.numel() for parameter in network.parameters())
        # one rank tells of all, whose GPUs are the same
        self._limit = ChipLimit(network, options.sequence, self._device if dist.get_rank() == 0 else _CPU)
        # of the whole model: boosted, it may hold shards
        self._shapes = {name: list(tensor.shape) for name, tensor in network.state_dict().items()}
        names = {name for name, _ in network.named_parameters()}
        self._tied = {name for name, _ in network.named_parameters(remove_duplicate=False)} - names
        if options.packing and self._task.precision == "bf16":
            # BF16 runs packed rows too, which unfused attention would not keep apart
            fuse_model(network)
        plugin = build_plugin(options, self._task.precision == "fp8", network)
        for sentence in getattr(plugin, "no_effect", ()):
            self._notice(sentence)
        rates = {"lr": options.lr, "betas": _BETAS, "weight_decay": options.weight_decay}
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(options.optimizer_of(self._task.precision), trained, **rates)
        self._boosted = BoostedModel(options.plugin, plugin, network, optimizer)
        self._boosted.before_update(self._check_norm)
        self._norm = 0.0
        if options.packing and (reason := why_not_packed(self._boosted.model)) is not None:
            raise ValueError(f"--packing is done by fused attention: {reason}; leave --packing out.")
        self._separator = load_tokenizer(str(tokens.tokenizer)).eos_token_id if options.packing else None

    def _with_adapters(self, config: PretrainedConfig) -> PeftModel:
        """The model with adapters; in FP8 its own weights take one byte a value."""
        options = self._options
        frozen = fp8_config(options.fp8_options, options.level) if self._task.precision == "fp8" else None
        network = build_model(
            options.model, config, self._device, options.recomputed, frozen=frozen, one_by_one=True
        )  # so that BF16 begins with the weights that FP8 has
        targets = options.lora_targets or ALL_LINEAR
        return with_adapters(
            network,
            options.lora,
            alpha=options.lora_alpha or 2 * options.lora,
            targets=targets if targets == ALL_LINEAR else targets.split(","),
        )

    def _take_step(self) -> bool:
        """One optimizer step; returns whether a rank was asked to stop."""
        began = time.perf_counter()
        sent = self._traffic.sent
        step = self._step + 1
        rate = self._schedule.rate(step)
        # set from the step number, so that a resumed run needs no state of a schedule
        for group in self._boosted.optimizer.param_groups:
            group["lr"] = rate
        tokens = self._batches.micro_batches(self._position)
        batches = [causal(part.to(self._device, non_blocking=True), self._separator) for part in tokens]
        # the loss reaches the host before the update: a step that is not finite is not taken
        loss, stopped = over_ranks(self._boosted.forward_backward(batches), self._stop_wanted(), self._device)
        skipped = False
        try:
            self._require_finite("loss", loss)
            # a norm that is not finite shows only in there, before any weight has changed
            self._boosted.update(self._options.max_norm)
        except NotFinite:
            self._boosted.abandon()  # the state before the step is what is saved
            raise
        except _Skip:
            skipped = True
            self._boosted.abandon()
            if self._recording is not None:
                self._recording.end_step()
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a step's time is that of its kernels, not of their launches
        seconds = time.perf_counter() - began
        self._step = step
        self._position += self._global_batch.sequences
        if self._log is not None and not skipped:
            metrics = StepMetrics(
                step=step,
                loss=loss,
                lr=rate,
                grad_norm=self._norm,
                tokens_per_second=self._global_batch.tokens / seconds,
                seconds=seconds,
                peak_memory=get_accelerator().max_memory_allocated(),
                wire_bytes=self._traffic.sent - sent + self._boosted.unseen_bytes,
            )
            self._log.write(metrics)
            share = self._limit.share(metrics.tokens_per_second / dist.get_world_size())
            self._tell("step", **dataclasses.asdict(metrics), share=share)
        return stopped

    def _check_norm(self, norm: float) -> None:
        """Called before any weight changes; the norm is the same on all ranks."""
        self._norm = norm
        self._require_finite("gradient norm", norm)

    def _require_finite(self, what: str, value: float) -> None:
        """Do with a step what the options say where a number that all ranks share is not finite.

        Raises:
            NotFinite: the run is to end.
            _Skip: the step is not to be taken.
        """
        # all ranks have the same number, so all raise or none does
        if math.isfinite(value):
            return
        sentence = f"The {what} became {value} at step {self._step + 1}."
        if self._recording is not None:
            sentence += f" {self._recording.blame()}"
        choice = self._options.on_nonfinite
        if choice == "raise":
            raise NotFinite(sentence)
        self._notice(f"{sentence} The step is {'left out' if choice == 'skip' else 'taken'}.")
        if choice == "skip":
            raise _Skip

    def _keep_last_good(self, saved: int) -> str:
        if self._step == 0:
            return "That is the first step: look at the data and the learning rate (--lr, --warmup)."
        if saved < self._step:
            if not self._boosted.is_finite():
                return f"Before it, weights or optimizer states were NaN or infinite already. {self._last_good()}"
            self._write_checkpoint(finite=True)
        return f"The state before it is in {self._good()}; resume from there with a lower --lr or another --seed."

    def _good(self) -> Path | str | None:
        """Return the last checkpoint of finite values; None where there is none."""
        return last_finite(checkpoints_in(self._task.checkpoints)) or self._began_good

    def _last_good(self) -> str:
        """Return the sentence that names it."""
        if (checkpoint := self._good()) is None:
            return "No checkpoint has finite ones; train anew with a lower --lr or another --seed, and another --out."
        return (
            f"The last checkpoint of finite values is {checkpoint}; resume from there with a lower --lr or another "
            "--seed."
        )

    def _save(self, stopped: bool) -> bool:
        """Save the state, unless it is not finite and the options end a run for that; tell whether it is saved.

        Raises:
            NotFinite: it is not, where the run was not to end anyhow.
        """
        # every rank asks, for it is a reduction
        finite = self._boosted.is_finite()
        if finite:
            self._write_checkpoint(finite)
            return True
        sentence = f"After step {self._step} weights or optimizer states are NaN or infinite"
        if self._options.on_nonfinite != "raise":
            self._write_checkpoint(finite)
            self._notice(f"{sentence}, and saved as such. {self._last_good()}")
            return True
        sentence = f"{sentence}, and not saved. {self._last_good()}"
        if not stopped:
            raise NotFinite(sentence)
        self._notice(sentence)
        return False

    def _notice(self, text: str) -> None:
        """Tell a sentence to keep, from one rank."""
        if dist.get_rank() == 0:
            self._tell("notice", text=text)

    def _write_checkpoint(self, finite: bool) -> None:
        state = RunState(
            step=self._step,
            position=self._position,
            world_size=dist.get_world_size(),
            precision=self._task.precision,
            tokens=self._task.tokens.identity,
            options=self._options,
        )
        self._tell("status", text=f"saving step {self._step}")
        if self._recording is not None:
            # a run that resumes from here does not take the sample of this step again
            self._recording.flush()
        folder = save_checkpoint(
            self._task.checkpoints, state, self._boosted, self._config, self._task.tokens.tokenizer, finite
        )
        self._tell("checkpoint", folder=str(folder), step=self._step)

    def _write_result(self) -> None:
        """Keep what the summary needs beside the metrics, in `result.json`."""
        peak = torch.tensor(get_accelerator().max_memory_allocated(), dtype=torch.int64, device=self._device)
        # the rank that needs most decides which GPU is large enough
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        layers, others, loads = self._rows()
        if dist.get_rank() == 0:
            result = {
                "step": self._step,
                "world_size": dist.get_world_size(),
                "peak_memory": int(peak),
                "parameters": self._parameters,
                "layers": layers,
                "others": others,
                "loads": loads,
                "traffic": self._traffic.rows(),
                "limit": self._limit.record([*layers, *others]),
            }
            write_whole(self._task.result, json.dumps(result, indent=1) + "\n")
        dist.barrier()  # a command looks whether it is there when its own ranks have ended

    def _rows(self) -> list[list[dict[str, Any]]]:
        """Return rows of the report, those of all pipeline stages: of linear layers, other parameters, and loads."""
        network = self._boosted.adapted or self._boosted.model.unwrap()
        found = report(network)
        tables = [[dataclasses.asdict(row) for row in rows] for rows in (found.rows, found.outside, found.loads)]
        for row in itertools.chain(*tables):
            row["name"] = row["name"].replace("_fsdp_wrapped_module.", "").removeprefix("base_model.model.")
        if not self._boosted.pipelined:
            return tables
        stages: list[list[list[dict[str, Any]]]] = [[] for _ in range(dist.get_world_size())]
        # each stage sees its own layers alone
        dist.all_gather_object(stages, tables)
        return [list({row["name"]: row for table in of for row in table}.values()) for of in zip(*stages, strict=True)]

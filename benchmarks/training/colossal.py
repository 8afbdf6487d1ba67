"""Engines by Colossal-AI's Booster: fp8booster's plugins and the native ones, with the same options."""

from __future__ import annotations

import fp8booster.colossal  # isort: skip  (mends colossalai before it is imported)
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import colossalai.booster.plugin as native_plugins
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin.plugin_base import Plugin
from colossalai.lazy import LazyInitContext
from colossalai.zero.gemini import gemini_optimizer
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import record_function

import fp8booster.plugins
from benchmarks.layers.peers import repaired_native_fp8
from benchmarks.training.data import Replica
from benchmarks.training.job import PARALLEL, PLUGINS, Job, parse_options
from benchmarks.training.models import build
from benchmarks.training.trainer import OPTIMIZER_RANGE, Trainer
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.plugins import fp8_config
from fp8booster.monitor.traffic import bytes_sent
from fp8booster.optim import HybridAdam

_WEIGHT_DECAY = 0.01  # torch's default for AdamW
# native Gemini's own optimizers all need a compiled extension (zero/gemini/gemini_optimizer.py:43)
gemini_optimizer._AVAIL_OPTIM_LIST.add(HybridAdam)


def ours(job: Job, device: torch.device, *, use_fp8: bool) -> Trainer:
    """The job's plugin of fp8booster, in FP8 or in BF16.

    Raises:
        ValueError: `fp8booster.plugins` has no such plugin.
    """
    name = PLUGINS[job.plugin]
    plugin_class = getattr(fp8booster.plugins, name, None)
    if plugin_class is None:
        able = [key for key, value in PLUGINS.items() if hasattr(fp8booster.plugins, value)]
        raise ValueError(f"fp8booster.plugins has no {name}; --plugin takes {', '.join(able)} here")
    options: dict[str, Any] = parse_options(job.plugin_options)
    if use_fp8:
        options |= {"use_fp8": True, "fp8_config": fp8_config(TrainOptions(fp8_options=job.fp8_options))}
    return boosted(job, device, job.plugin, plugin_class, options)


def native(job: Job, device: torch.device, *, plugin: str, use_fp8: bool = False) -> Trainer:
    """A native plugin in BF16, or with native's own FP8, repaired and compiled.

    The job's plugin options are for it if it is the job's plugin.
    """
    options = parse_options(job.plugin_options) if plugin == job.plugin else {}
    if use_fp8:
        fp8 = repaired_native_fp8()
        fp8._linear_fp8 = torch.compile(lambda x, w, b=None: fp8._LinearFp8.apply(x, w, b), dynamic=False)
        options["use_fp8"] = True
    return boosted(job, device, plugin, getattr(native_plugins, PLUGINS[plugin]), options)


def boosted(
    job: Job, device: torch.device, name: str, plugin_class: type[Plugin], options: dict[str, Any]
) -> Trainer:
    """A model boosted by one plugin; `name` is the plugin's in `PLUGINS`."""
    torch.manual_seed(job.seed)  # of the CPU and of all GPUs
    lazy = job.lazy and name in PARALLEL
    with LazyInitContext(default_device=device) if lazy else nullcontext():
        model = build(
            job.architecture.config(job.sequence),
            dtype=torch.float32 if name == "fsdp" else torch.bfloat16,
            device=torch.device("cpu") if lazy else device,
            checkpointing=job.checkpointing,
        )
    plugin = plugin_class(**arguments(job, name, model) | options)
    optimizer = _optimizer(name, model, job.lr)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    clip = _CLIPS.get(name)
    pipelined = getattr(plugin, "pp_size", 1) > 1
    # stage 2 keeps only shards of the gradients, so it reduces each micro-batch; HybridParallel does not say so itself
    accumulates = plugin.support_no_sync() and getattr(plugin, "zero_stage", 1) != 2

    def forward_backward(tokens: torch.Tensor) -> torch.Tensor | None:
        if pipelined:
            return booster.execute_pipeline(
                iter([{"input_ids": tokens, "labels": tokens}]),
                model,
                lambda outputs, _: outputs.loss,
                optimizer,
                return_loss=True,
            )["loss"]
        losses = []
        for micro, part in enumerate(tokens.split(job.micro_batch), 1):
            unsynchronized = micro < job.micro_batches and accumulates
            with booster.no_sync(model, optimizer) if unsynchronized else nullcontext():
                loss = model(input_ids=part, labels=part).loss / job.micro_batches
                booster.backward(loss, optimizer)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def step(tokens: torch.Tensor) -> torch.Tensor | None:
        loss = forward_backward(tokens)
        with record_function(OPTIMIZER_RANGE):
            if clip is not None:
                clip(model.module, job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return Trainer(
        model=model,
        optimizer=optimizer,
        step=step,
        replica=replica_of(plugin),
        unseen_bytes=_unseen_bytes(name, plugin, model),
    )


def arguments(job: Job, name: str, model: nn.Module) -> dict[str, Any]:
    """What the job says, as the arguments of a plugin."""
    common = {"precision": "bf16", "max_norm": job.max_norm}
    match name:
        case "low_level_zero":
            return common | {"stage": job.zero_stage(name)}
        case "gemini":
            return common | {"placement_policy": "static", "tp_size": job.tp}
        case "hybrid":
            pipeline = {"num_microbatches": job.micro_batches} if job.pp > 1 else {}
            shared = {
                "enable_sequence_parallelism": True,
                "sequence_parallelism_mode": job.sp_mode,
                "sp_size": job.sp,
            }
            return (
                common
                | {"tp_size": job.tp, "pp_size": job.pp, "zero_stage": job.zero_stage(name)}
                | pipeline
                | (shared if job.sp_mode is not None else {})
            )
        case "fsdp":
            return {
                "mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16),
                "auto_wrap_policy": ModuleWrapPolicy({type(model.model.layers[0])}),
            }
    return {}


def replica_of(plugin: Plugin) -> Replica:
    """The place of this rank among those that read different tokens."""
    if hasattr(plugin, "dp_axis"):  # hybrid
        return Replica(*(int(of(plugin.dp_axis)) for of in (plugin.pg_mesh.coordinate, plugin.pg_mesh.size)))
    sharing = getattr(plugin, "tp_size", 1)  # Gemini lays tensor parallel ranks side by side
    return Replica(dist.get_rank() // sharing, dist.get_world_size() // sharing)


def _optimizer(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    if name == "gemini":
        return HybridAdam(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY)
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=_WEIGHT_DECAY, fused=True)


def _unseen_bytes(name: str, plugin: Plugin, model: nn.Module) -> int:
    """What DDP's reducer in C++ sends where no hook of Python reduces gradients."""
    if name != "ddp" or getattr(plugin, "reduces_in_fp8", plugin.fp8_communication):
        return 0
    payload = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return bytes_sent("all_reduce", payload, dist.get_world_size())


_CLIPS: dict[str, Callable[[nn.Module, float], Any]] = {
    "ddp": lambda module, norm: nn.utils.clip_grad_norm_(module.parameters(), norm),
    "fsdp": lambda module, norm: module.clip_grad_norm_(norm),
}
"""The plugins that do not clip by themselves."""

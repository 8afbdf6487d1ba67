"""Engines by Colossal-AI's Booster: fp8booster's plugins and Colossal-AI's, with the same options."""

from __future__ import annotations

import fp8booster.colossal  # isort: skip  (patches colossalai before it is imported)
import tempfile
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import colossalai.booster.plugin as native_plugins
import torch
import torch.distributed as dist
from colossalai.booster.plugin.plugin_base import Plugin
from colossalai.lazy import LazyInitContext
from colossalai.zero.gemini import gemini_optimizer
from torch import nn
from torch.profiler import record_function

import fp8booster.plugins
from benchmarks.layers.peers import repaired_native_fp8
from benchmarks.training.built_engine import OPTIMIZER_RANGE, BuiltEngine
from benchmarks.training.job import MOE, Job
from fp8booster import capture_layers, fuse, record
from fp8booster.cli.train.key_values import fp8_config, parse_pairs
from fp8booster.monitor.sinks import FILE
from fp8booster.optim import HybridAdam
from fp8booster.plugins.fp8_plugin import FP8Plugin
from fp8booster.training.boosted import BoostedModel, causal
from fp8booster.training.models import build
from fp8booster.training.optimizers import make_optimizer
from fp8booster.training.parallel import PARALLEL, PLUGINS
from fp8booster.training.plugins import make_plugin

WEIGHT_DECAY = 0.01  # torch's default for AdamW
_EPS = 1e-8  # the same
# native Gemini's own optimizers all need a compiled extension (zero/gemini/gemini_optimizer.py:43)
gemini_optimizer._AVAIL_OPTIM_LIST.add(HybridAdam)


FUSED_BEFORE = ("low_level_zero", "ddp")
"""Plugins that take a model in BF16 whose decoder layers and loss are fused; others replace parts of it themselves."""


def ours(job: Job, device: torch.device, *, use_fp8: bool, fused: bool = False) -> BuiltEngine:
    """The job's plugin of fp8booster, in FP8 or in BF16.

    Args:
        job: what to train.
        device: of this rank.
        use_fp8: FP8, which fuses decoder layers and loss unless the job's FP8 options say otherwise.
        fused: in BF16, with the same parts fused, and captured where the job's FP8 options say so.

    Raises:
        ValueError: `fp8booster.plugins` has no such plugin, it takes no fused model, or it has no ZeRO groups to send
            one-sided in.
    """
    if fused and job.plugin not in FUSED_BEFORE:
        raise ValueError(
            f"--plugin {job.plugin} takes no model with fused blocks in BF16; {' and '.join(FUSED_BEFORE)} do"
        )
    name = PLUGINS[job.plugin]
    plugin_class = getattr(fp8booster.plugins, name, None)
    if plugin_class is None:
        able = [key for key, value in PLUGINS.items() if hasattr(fp8booster.plugins, value)]
        raise ValueError(f"fp8booster.plugins has no {name}; --plugin takes {', '.join(able)} here")
    options: dict[str, Any] = parse_pairs(job.plugin_options, "--plugin-option")
    if use_fp8:
        options |= {"use_fp8": True, "fp8_config": fp8_config(job.fp8_options)}
    built = boost(job, device, job.plugin, plugin_class, options, fused=fused)
    graphs = fp8_config(job.fp8_options).cuda_graphs
    if fused and graphs is not False:  # the fused blocks of BF16 have what FP8's have
        capture_layers(built.model, only_where_host_limits=graphs is None)
    if use_fp8 and job.record:
        # as a run does, with the file; it ends with the process
        record(built.model, every=job.record, sink=Path(tempfile.mkdtemp()) / FILE)
    return built


def native(job: Job, device: torch.device, *, plugin: str, use_fp8: bool = False) -> BuiltEngine:
    """A plugin of Colossal-AI's in BF16, or with its own FP8, repaired and compiled.

    The job's plugin options are for it if it is the job's plugin.
    """
    options = parse_pairs(job.plugin_options, "--plugin-option") if plugin == job.plugin else {}
    if use_fp8:
        fp8 = repaired_native_fp8()
        fp8._linear_fp8 = torch.compile(lambda x, w, b=None: fp8._LinearFp8.apply(x, w, b), dynamic=False)
        options["use_fp8"] = True
    return boost(job, device, plugin, getattr(native_plugins, PLUGINS[plugin]), options)


def boost(
    job: Job,
    device: torch.device,
    name: str,
    plugin_class: type[Plugin],
    options: dict[str, Any],
    *,
    fused: bool = False,
) -> BuiltEngine:
    """A model boosted by one plugin; `name` is the plugin's in `PLUGINS`, `fused` is of the model before that."""
    torch.manual_seed(job.seed)  # of the CPU and of all GPUs
    lazy = job.lazy and name in PARALLEL
    with LazyInitContext(default_device=device) if lazy else nullcontext():
        model = build(
            job.architecture.config(job.sequence),
            # FSDP's shards are its master weights, but for an optimizer that keeps those of BF16 weights itself
            dtype=torch.float32 if name == "fsdp" and job.optimizer == "adamw" else torch.bfloat16,
            device=torch.device("cpu") if lazy else device,
            checkpointing=job.recomputed,
        )
    if job.outlier is not None:
        plant_outlier(model, *job.outlier)
    if job.gradient_scale is not None:
        scale_loss(model, job.gradient_scale)
    if fused:
        fuse(model)
    parallel = job.parallel(name)
    if name == MOE:
        parallel.replicas(dist.get_world_size())
    # Colossal-AI adds 1e-6 to the norm before it clips, which is none where gradients are as small
    max_norm = job.max_norm if job.gradient_scale is None and not job.update_in_backward else 0.0
    plugin = make_plugin(plugin_class, parallel, model, max_norm, options)
    boosted = BoostedModel(name, plugin, model, _optimizer(job, plugin_class, model))
    if job.fp32_start:
        put_between_16_bits([master for group in boosted.optimizer.optim.param_groups for master in group["params"]])

    def step(tokens: torch.Tensor) -> torch.Tensor | None:
        with torch.autograd.set_multithreading_enabled(not fused):  # as with FP8
            loss = boosted.forward_backward([causal(part) for part in tokens.split(job.micro_batch)])
        with record_function(OPTIMIZER_RANGE):
            boosted.update(max_norm)
        return loss if loss is None or job.gradient_scale is None else loss / job.gradient_scale

    return BuiltEngine(
        model=boosted.model,
        optimizer=boosted.optimizer,
        step=step,
        replica=boosted.replica,
        boosted=boosted,
        unseen_bytes=boosted.unseen_bytes,
    )


def _optimizer(job: Job, plugin_class: type[Plugin], model: nn.Module) -> torch.optim.Optimizer:
    ours = issubclass(plugin_class, FP8Plugin)
    if not ours and plugin_class is native_plugins.GeminiPlugin:
        return HybridAdam(model.parameters(), lr=job.lr, weight_decay=WEIGHT_DECAY)
    name = job.optimizer if ours else "adamw"
    options = {"update_in_backward": True} if ours and job.update_in_backward else {}
    rates = {"lr": job.lr, "eps": _EPS * (job.gradient_scale or 1), "weight_decay": WEIGHT_DECAY}
    return make_optimizer(name, model.parameters(), **rates, **options)


def plant_outlier(model: nn.Module, channel: int, factor: float) -> None:
    """Multiply one output channel of a middle layer's gate and up, so that down's input has an outlier."""
    feed_forward = model.model.layers[len(model.model.layers) // 2].mlp
    with torch.no_grad():
        for projection in (feed_forward.gate_proj, feed_forward.up_proj):
            projection.weight[channel] *= factor


@torch.no_grad()
def put_between_16_bits(masters: Iterable[torch.Tensor]) -> None:
    """Spread FP32 masters, which begin as BF16 values, over all values that BF16 rounds to theirs.

    A BF16 value begins in the middle of them, so that its first small updates are lost in BF16; and where it lies
    halfway between two FP8 values, any update takes it to one of them.
    """
    for master in masters:
        mantissa, exponent = torch.frexp(master)
        below = mantissa.abs() == 0.5  # there the values below lie twice as close
        spacing = torch.ldexp(torch.ones_like(master), exponent - 8 - below.int())
        noise = spacing * (torch.rand_like(master) - 0.5)
        master.add_(noise.where(master != 0, 0.0))


def scale_loss(model: nn.Module, factor: float) -> None:
    """Multiply the loss in training, and with it all gradients."""

    def scale(module: nn.Module, _: Any, output: Any) -> Any:
        if module.training:
            output.loss = output.loss * factor
        return output

    model.register_forward_hook(scale)

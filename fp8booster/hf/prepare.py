"""Make a model ready for a library that wraps it and makes its optimizer by itself."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fp8booster.comm import DDPState, average_in_fp8
from fp8booster.comm.ddp import BUCKET_MB, at_forward
from fp8booster.comm.threshold import use_links
from fp8booster.config import FP8Config, config_or_default
from fp8booster.engine import DDP, FSDP
from fp8booster.hf.sharding import follow_sharding, name_units, why_not_sharded
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse_model, fused_summary, leave_unfused, use_fused_loss, use_native_loss
from fp8booster.nn.graphs import capture_as_configured

if TYPE_CHECKING:  # neither need be installed
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

_WRAPPERS = (DataParallel, DistributedDataParallel, FullyShardedDataParallel, FSDPModule)

_PREPARED = "_fp8booster_prepared"
"""Attribute of a model that `prepare` was given."""

_log = logging.getLogger(__name__)


def prepare(
    model: nn.Module,
    config: FP8Config | None = None,
    *,
    accelerator: Accelerator | None = None,
    fused_loss: bool = True,
) -> nn.Module:
    """Let a model train in FP8, in place: FP8 layers, fused decoder layers and loss, gradients that are sent in FP8.

    Call it when the model has its weights, before its optimizer is made and before `accelerator.prepare`. Parameters,
    their names and the state dict stay as they are, so `save_pretrained` writes what it would without FP8. The report
    of what was converted and fused is logged under "fp8booster.hf" (`fp8booster.report(model)` gives all of it).
    Called again, before a library wraps the model, it applies the new arguments.

    Args:
        model: any module; transformers' language models, with peft's adapters or without, are fused too.
        config: which layers, and how; None is `FP8Config()`. `messages=None` leaves gradients as they are. A warning
            names each option that has no effect here, such as `gradient_accumulation`, which is ZeRO's.
        accelerator: that the model is for. A model that lies on one device is moved to the accelerator's; FSDP2 does so
            itself. DDP's gradients are sent in buckets of 64 MiB, unless the accelerator was given
            `DistributedDataParallelKwargs`. None: the model is on the device that it trains on, and whoever wraps it
            by DistributedDataParallel chooses the buckets.
        fused_loss: compute the loss over chunks of logits. The model then gives no logits in training: turn it off
            where a loss of your own reads them.

    Returns:
        The model.

    Raises:
        ValueError: the model is wrapped already, its device has no FP8 products, no layer can compute in FP8, the
            accelerator trains in FP32, in FP8 of its own, or by DeepSpeed or FSDP1, or the configuration has
            `fused=False` and the model was fused before.
        TypeError: the model is no module, or the configuration no FP8Config.
    """
    config = config_or_default(config)
    if accelerator is None:
        return convert(model, config, fused_loss=fused_loss)
    if accelerator.ddp_handler is None and config.messages is not None:
        accelerator.ddp_handler = _buckets()
    return convert(model, config, state=accelerator.state, fused_loss=fused_loss)


def convert(
    model: nn.Module, config: FP8Config, *, state: AcceleratorState | None = None, fused_loss: bool
) -> nn.Module:
    """Convert a model as `prepare` does.

    Args:
        state: of the accelerator that the model is for.
    """
    # accelerate's autocast around the forward; a second Trainer finds that of the first
    inside = "_original_forward" in vars(model)
    if isinstance(model, _WRAPPERS) or (inside and not is_prepared(model)):
        raise ValueError(
            "the model was wrapped before it was converted to FP8; give fp8booster.hf.prepare what accelerator.prepare "
            "is given, before it"
        )
    if state is not None:
        _check_precision(model, state.mixed_precision)
    plugin = None if state is None else _sharding_of(state, model)
    if state is not None:
        _warn_of_lone_ranks(state)
    config = (DDP if plugin is None else FSDP).used_with_warnings(config, stacklevel=3)
    device = next((each.device for each in model.parameters()), torch.device("cpu")) if state is None else state.device
    require_fp8(device, config.emulate, config.granularity)
    if not config.fused:
        leave_unfused(model)
    if state is not None and plugin is None and getattr(model, "hf_device_map", None) is None:
        model.to(device)  # before it is fused, for then weights of merged products lie together
    convert_to_fp8(model, config)
    fused = ""
    if config.fused:
        fuse_model(model)
    capture_as_configured(model, config)
    if config.fused:
        # an earlier trainer of the model may have asked for the other
        if fused_loss:
            use_fused_loss(model)
        else:
            use_native_loss(model)
        fused = f"; {fused_summary(model)}"
    if plugin is not None:
        name_units(plugin)
        follow_sharding(model, config.messages)
    elif config.messages is not None:
        average_in_fp8(model, DDPState(encoding=config.messages))
    else:
        at_forward(model, None)  # what an earlier call may have asked for
    thresholds = "" if config.messages is None else f"; sizes from which FP8 is sent: {use_links().source}"
    model.__dict__[_PREPARED] = True
    _log.info("%s%s%s", report(model).summary(), fused, thresholds)
    return model


def is_prepared(model: nn.Module) -> bool:
    """Tell whether `prepare` was given a model."""
    return _PREPARED in vars(model)


def _check_precision(model: nn.Module, mixed_precision: str) -> None:
    """Raise ValueError where accelerate would compute in FP32, or in FP8 layers of another library."""
    if mixed_precision == "fp8":
        raise ValueError(
            'mixed_precision="fp8" converts the model to FP8 layers of another library; give accelerate "bf16"'
        )
    # the embedding, as a rule: adapters are in FP32 in models of 16 bits too
    first = next((each.dtype for each in model.parameters() if each.is_floating_point()), None)
    if first == torch.float32 and mixed_precision == "no":
        raise ValueError(
            "what is not in FP8 needs a 16-bit type, and the model is in FP32; train with bf16=True of "
            'TrainingArguments or mixed_precision="bf16" of Accelerator, or load the model in BF16'
        )


def _warn_of_lone_ranks(state: AcceleratorState) -> None:
    """Warn where a launcher started several processes and accelerate takes each for the only one, as without a GPU."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if state.distributed_type.value == "NO" and ranks != "1":
        warnings.warn(
            f"each of {ranks} processes trains alone on {state.device}, and gradients are not averaged: accelerate "
            "found no GPU; to train on CPUs give TrainingArguments use_cpu=True, or Accelerator cpu=True",
            stacklevel=4,
        )


def _sharding_of(state: AcceleratorState, model: nn.Module) -> Any:
    """Return accelerate's plugin of FSDP2, or None without it; ValueError where FP8 layers do not go with an engine."""
    kind = state.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        raise ValueError(
            f"FP8 layers were not tried with {kind} of accelerate; use DDP or FSDP2, or LowLevelZeroPlugin of "
            "fp8booster.plugins"
        )
    plugin = state.fsdp_plugin if kind == "FSDP" else None
    if plugin is not None and (reason := why_not_sharded(plugin, model)) is not None:
        raise ValueError(reason)
    return plugin


def _buckets() -> Any:
    from accelerate import DistributedDataParallelKwargs

    return DistributedDataParallelKwargs(bucket_cap_mb=BUCKET_MB)

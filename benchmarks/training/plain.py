"""One GPU without a plugin: fp8booster on BF16 weights, on FP32 ones under autocast, or under adapters; and peft's
adapters on a model in BF16.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function
from transformers import PreTrainedModel

from benchmarks.training.built_engine import OPTIMIZER_RANGE, BuiltEngine
from benchmarks.training.job import Job
from fp8booster import FP8Config, convert_to_fp8, fuse
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.optim import AdamW
from fp8booster.serving.read import random_frozen
from fp8booster.training.adapters import ALL_LINEAR, with_adapters
from fp8booster.training.batches import Replica
from fp8booster.training.models import build, prepared
from fp8booster.training.optimizers import make_optimizer


def plain(job: Job, device: torch.device) -> BuiltEngine:
    """The job's model converted and fused; or frozen, made in FP8 layer by layer, with adapters.

    Without adapters an AdamW of 8-bit moments updates in backward, and gradients are not clipped, since no two are
    there at once.

    Raises:
        ValueError: more than one process; another optimizer.
    """
    require_one_process("--precision plain")
    config = fp8_config(job.fp8_options)
    if job.lora is not None:
        model = _adapted(job, device, config)
    elif job.optimizer == "adamw-8bit":
        torch.manual_seed(job.seed)
        model = build(
            job.architecture.config(job.sequence), dtype=torch.bfloat16, device=device, checkpointing=job.recomputed
        )
        convert_to_fp8(model, config)
    else:
        raise ValueError("--precision plain updates in backward; use --optimizer adamw-8bit, or --lora")
    fuse(model)
    if job.lora is not None:
        return _built(job, model, make_optimizer(job.optimizer, _trained(model), lr=job.lr))
    optimizer = AdamW(model.parameters(), lr=job.lr, update_in_backward=True, micro_batches=job.micro_batches)
    return _built(job, model, optimizer)


def autocast(job: Job, device: torch.device) -> BuiltEngine:
    """A loop by hand over the weights of `trainer`: in FP32, converted and fused, under autocast.

    Raises:
        ValueError: more than one process.
    """
    require_one_process("--precision trainer")
    model = in_fp32(job, device)
    convert_to_fp8(model, fp8_config(job.fp8_options))
    fuse(model)
    optimizer = make_optimizer(job.optimizer, model.parameters(), lr=job.lr)
    return _built(job, model, optimizer, partial(torch.autocast, device.type, torch.bfloat16))


def in_fp32(job: Job, device: torch.device) -> PreTrainedModel:
    """The job's model, of the seed's weights, in FP32."""
    torch.manual_seed(job.seed)
    config = job.architecture.config(job.sequence)
    return build(config, dtype=torch.float32, device=device, checkpointing=job.recomputed)


def peft_lora(job: Job, device: torch.device) -> BuiltEngine:
    """LoRA of peft on the same weights in BF16, with torch's AdamW.

    Raises:
        ValueError: more than one process.
    """
    require_one_process("--against peft-lora")
    model = _adapted(job, device, None)
    return _built(job, model, make_optimizer("adamw", _trained(model), lr=job.lr))


def require_one_process(option: str) -> None:
    """Raise ValueError where there are several."""
    if dist.get_world_size() > 1:
        raise ValueError(f"{option} trains on one GPU; add --processes 1")


def _adapted(job: Job, device: torch.device, config: FP8Config | None) -> nn.Module:
    """A model of the seed's weights, frozen in FP8 or in BF16, with adapters in BF16, as ZeRO has them."""
    torch.manual_seed(job.seed)
    model = prepared(random_frozen(job.architecture.config(job.sequence), config, device=device), job.recomputed)
    adapted = with_adapters(model, job.lora, alpha=2 * job.lora, targets=ALL_LINEAR)
    for parameter in _trained(adapted):
        parameter.data = parameter.data.bfloat16()
    return adapted


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _built(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    precision: Callable[[], AbstractContextManager] = nullcontext,
) -> BuiltEngine:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in tokens.split(job.micro_batch):
            with precision():
                loss = model(input_ids=part, labels=part).loss / job.micro_batches
            with torch.autograd.set_multithreading_enabled(False):  # as the plugins do: the host is faster so
                loss.backward()
            losses.append(loss.detach())
        if not getattr(optimizer, "updates_in_backward", False):
            with record_function(OPTIMIZER_RANGE):
                nn.utils.clip_grad_norm_(_trained(model), job.max_norm)
                optimizer.step()
                optimizer.zero_grad()
        return torch.stack(losses).sum()

    return BuiltEngine(model=model, optimizer=optimizer, step=step, replica=Replica(0, 1))

"""FSDP2: fp8booster by its one call, and for comparison PyTorch in BF16, compiled, and torchao's FP8 layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function

from benchmarks.training.built_engine import OPTIMIZER_RANGE, BuiltEngine
from benchmarks.training.job import Job
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.training.batches import Replica
from fp8booster.training.models import build
from fp8booster.training.optimizers import make_optimizer

_DEVIATION = 0.02  # of the initial weights, as Hugging Face's default


def ours(job: Job, device: torch.device) -> BuiltEngine:
    """FP32 weights, converted, fused and sharded by `fp8booster.fully_shard` alone.

    In BF16 for an optimizer that keeps masters of BF16 weights itself.

    Args:
        job: what to train; its plugin and parallel sizes are not used.
        device: of this rank.
    """
    import fp8booster

    model = _on_meta(job, torch.float32 if job.optimizer == "adamw" else torch.bfloat16)
    fp8booster.fully_shard(model, fp8_config(job.fp8_options))
    _fill(model, job, device)
    return _built(job, model, make_optimizer(job.optimizer, model.parameters(), lr=job.lr))


def fsdp2(
    job: Job, device: torch.device, *, compiled: bool = False, mode: str | None = None, float8: str | None = None
) -> BuiltEngine:
    """Masters in FP32, weights gathered and products in BF16, gradients reduced in FP32, each layer a unit.

    Args:
        job: what to train; its plugin and parallel sizes are not used.
        device: of this rank.
        compiled: each decoder layer by torch.compile.
        mode: of torch.compile; None is its default.
        float8: torchao's "tensorwise", with weights gathered in FP8, or "rowwise".
    """
    model = _on_meta(job, torch.float32)
    if float8 is not None:
        _to_float8(model, float8)
    layers = model.model.layers
    if compiled:
        for index, layer in enumerate(layers):
            layers[index] = torch.compile(layer, mode=mode)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    _fill(model, job, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job.lr, fused=True)
    return _built(job, model, optimizer, _compute_scales if float8 == "tensorwise" else None)


def _on_meta(job: Job, dtype: torch.dtype) -> nn.Module:
    config = job.architecture.config(job.sequence)
    return build(config, dtype=dtype, device=torch.device("meta"), checkpointing=job.recomputed)


def _built(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, after_step: Callable[[nn.Module], None] | None = None
) -> BuiltEngine:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for micro, part in enumerate(tokens.split(job.micro_batch), 1):
            model.set_requires_gradient_sync(micro == job.micro_batches)
            loss = model(input_ids=part, labels=part).loss / job.micro_batches
            loss.backward()
            losses.append(loss.detach())
        with record_function(OPTIMIZER_RANGE):
            nn.utils.clip_grad_norm_(model.parameters(), job.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step(model)
        return torch.stack(losses).sum()

    return BuiltEngine(
        model=model, optimizer=optimizer, step=step, replica=Replica(dist.get_rank(), dist.get_world_size())
    )


def _compute_scales(model: nn.Module) -> None:
    """Compute torchao's scales of all weights in one collective, as its users do after each step."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    precompute_float8_dynamic_scale_for_fsdp(model)


def _to_float8(model: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if recipe == "tensorwise"
        else Float8LinearConfig.from_recipe_name(recipe)
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)


def _fill(model: nn.Module, job: Job, device: torch.device) -> None:
    """Give a sharded model from the meta device memory and random weights."""
    model.to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(job.seed + dist.get_rank())  # a rank draws its shard alone
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, _DEVIATION)
    with device:  # no parameters: computed, not drawn
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)

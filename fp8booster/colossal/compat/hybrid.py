"""Mends of hybrid parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(
    module="colossalai.amp.naive_amp.mixed_precision_optimizer",
    place="amp/naive_amp/mixed_precision_optimizer.py:84; tensor/colo_tensor.py:6",
    needed_when="an optimizer that computes in place, as torch.optim.AdamW does, trains ColoParameters without ZeRO",
)
def masters_are_plain_tensors(module: ModuleType, patch: Patch) -> None:
    """The FP32 masters of HybridParallelPlugin with zero_stage=0 are plain tensors, which change in place.

    Without it those of ColoParameters (made by native use_fp8) are ColoTensors, whose `mul_` is a `mul`: moments of
    AdamW never decay, and the loss is NaN by the third step. No longer needed when the `parameters` of
    `MixedPrecisionOptimizer(AdamW([ColoParameter(torch.zeros(1).bfloat16())]), "bf16")` hold no ColoTensor.
    """
    from colossalai.tensor.colo_tensor import INPALCE_MAPPING

    if torch.Tensor.mul_ not in INPALCE_MAPPING:
        return
    optimizer_class = module.MixedPrecisionOptimizer
    upstream = optimizer_class.__init__

    @functools.wraps(upstream)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        for master, working in self.master_to_working_map.items():
            if master is not working:
                master.__class__ = torch.Tensor

    patch.set(optimizer_class, "__init__", __init__)


@mend(
    module="colossalai.booster.plugin.hybrid_parallel_plugin",
    place="booster/plugin/hybrid_parallel_plugin.py:1516",
    needed_when="booster.enable_lora with tp_size or pp_size above 1",
)
def adapters_need_a_whole_model(module: ModuleType, patch: Patch) -> None:
    """LoRA is refused with a sentence where tensor parallelism or a pipeline would cut the model.

    Without it tensor parallelism raises an AssertionError without words, and a pipeline fails when the model is boosted
    (AttributeError: no attribute 'embed_tokens'), for the policies do not look behind peft's wrapper. No longer needed
    when such a model trains.
    """
    plugin = module.HybridParallelPlugin
    upstream = plugin.enable_lora

    @functools.wraps(upstream)
    def enable_lora(self, *args: Any, **kwargs: Any) -> nn.Module:
        if self.tp_size > 1 or self.pp_size > 1:
            raise ValueError(
                "colossalai does not cut a model with adapters; use tp_size=1 and pp_size=1 with LoRA, not "
                f"tp_size={self.tp_size} and pp_size={self.pp_size}"
            )
        return upstream(self, *args, **kwargs)

    patch.set(plugin, "enable_lora", enable_lora)


@mend(
    module="colossalai.booster.plugin.hybrid_parallel_plugin",
    place="booster/plugin/hybrid_parallel_plugin.py:156,242,793",
    needed_when="gradients accumulate without no_sync under sequence parallelism (split_gather, ring) or tied weights",
)
def parts_of_gradients_are_added_once(module: ModuleType, patch: Patch) -> None:
    """A gradient of which each rank has a part is added over the ranks once for each micro-batch.

    Without it what has accumulated is added after each backward: with two ranks, the first of two micro-batches counts
    twice in the gradients of normalization weights, and of weights that pipeline stages share. No longer needed when
    those gradients are the same with and without `no_sync` for the first micro-batch.
    """
    from fp8booster.colossal.hybrid.gradients import gradients_to_sum, shared_between_stages

    wrapper, zero = module.HybridParallelModule, module.HybridParallelZeroOptimizer

    def sums_of(owner: Any, find: Callable[[nn.Module], list], model: nn.Module) -> list:
        return owner.__dict__.setdefault(f"_{find.__name__}", find(model))

    def part(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor | None:
        known = id(parameter) in optimizer.pid_to_grad_store
        return optimizer.get_working_grad_by_param_id(id(parameter)) if known else None

    def spreading(upstream: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def backward(self, *args: Any, **kwargs: Any) -> None:
            for find in (gradients_to_sum, shared_between_stages):
                for parameters, sums in sums_of(self.model, find, self.model):
                    sums.spread({parameter: parameter.grad for parameter in parameters})
            if isinstance(self, zero):
                for parameters, sums in sums_of(self, gradients_to_sum, self.model):
                    sums.spread({parameter: part(self, parameter) for parameter in parameters})
            upstream(self, *args, **kwargs)

        return backward

    def marking(upstream: Callable[..., None], find: Callable[[nn.Module], list]) -> Callable[..., None]:
        @functools.wraps(upstream)
        def sync(self, *args: Any, **kwargs: Any) -> None:
            upstream(self, *args, **kwargs)
            for parameters, sums in sums_of(self, find, self):
                sums.mark(parameters)

        return sync

    upstream_of_zero = zero._sync_sp_grads

    @functools.wraps(upstream_of_zero)
    def _sync_sp_grads(self) -> None:
        upstream_of_zero(self)
        if self.require_grad_sync:
            for parameters, sums in sums_of(self, gradients_to_sum, self.model):
                sums.mark(parameters)

    for optimizer_class in (module.HybridParallelNaiveOptimizer, module.HybridParallelAMPOptimizer, zero):
        for name in ("backward", "backward_by_grad"):
            patch.set(optimizer_class, name, spreading(getattr(optimizer_class, name)))
    patch.set(wrapper, "sync_sp_grads", marking(wrapper.sync_sp_grads, gradients_to_sum))
    patch.set(wrapper, "sync_shared_params", marking(wrapper.sync_shared_params, shared_between_stages))
    patch.set(zero, "_sync_sp_grads", _sync_sp_grads)


@mend(
    module="colossalai.checkpoint_io.hybrid_parallel_checkpoint_io",
    place="checkpoint_io/hybrid_parallel_checkpoint_io.py:118,1071",
    needed_when="no CUDA or NPU device",
)
def cpu_shards_are_not_pinned(module: ModuleType, patch: Patch) -> None:
    """`use_async=True` writes shards of hybrid parallel runs from plain memory where there is no device to pin it for.

    Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend. No longer needed when
    `booster.save_model(model, path, shard=True, use_async=True)` returns on a machine without a GPU.
    """
    from colossalai.accelerator import get_accelerator

    if get_accelerator().name != "cpu":
        return
    for name in ("_model_sharder", "_optimizer_sharder"):
        patch.set(module.HybridParallelCheckpointIO, name, staticmethod(_unpinned(module, name)))


def _unpinned(module: ModuleType, name: str) -> Callable[..., Any]:
    upstream = getattr(module.HybridParallelCheckpointIO, name)

    @functools.wraps(upstream)
    def sharder(*args: Any, pinned_state_dicts: dict | None = None, **kwargs: Any) -> Any:
        return upstream(*args, **kwargs)

    return sharder


@mend(
    module="colossalai.shardformer.policies.command",
    place="shardformer/modeling/command.py:395",
    needed_when="enable_flash_attention is off",
)
def command_prepares_masks_for_its_attention(module: ModuleType, patch: Patch) -> None:
    """Command-R's policy switches flash attention on before the first forward, as its attention does within it.

    Without it: AssertionError: Flash Attention Error: attention_mask should be a dict. No longer needed when a
    CohereForCausalLM trains under HybridParallelPlugin(tp_size=2, pp_size=1).
    """
    upstream = module.CommandPolicy.preprocess

    @functools.wraps(upstream)
    def preprocess(self) -> nn.Module:
        self.shard_config.enable_flash_attention = True
        return upstream(self)

    patch.set(module.CommandPolicy, "preprocess", preprocess)

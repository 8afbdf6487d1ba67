"""Patches of hybrid parallelism."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements

_PLUGIN = "booster.plugin.hybrid_parallel_plugin"


def _mul_is_out_of_place(module: ModuleType) -> bool:
    from colossalai.tensor.colo_tensor import INPALCE_MAPPING

    return torch.Tensor.mul_ in INPALCE_MAPPING


@wrap(
    "amp.naive_amp.mixed_precision_optimizer:MixedPrecisionOptimizer.__init__",
    "amp/naive_amp/mixed_precision_optimizer.py:84; tensor/colo_tensor.py:6",
    needed_when="an optimizer that computes in place, as torch.optim.AdamW does, trains ColoParameters without ZeRO",
    only_if=_mul_is_out_of_place,
)
def masters_are_plain_tensors(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """The FP32 masters of HybridParallelPlugin with zero_stage=0 are plain tensors, which change in place.

    Without it those of ColoParameters (made by native use_fp8) are ColoTensors, whose `mul_` is a `mul`: moments of
    AdamW never decay, and the loss is NaN by the third step.
    """
    from colossalai.tensor.colo_tensor import ColoTensor

    upstream(self, *args, **kwargs)
    for master, working in self.master_to_working_map.items():
        if master is not working and isinstance(master, ColoTensor):
            master.__class__ = torch.Tensor


@wrap(
    f"{_PLUGIN}:HybridParallelPlugin.__init__",
    "booster/plugin/hybrid_parallel_plugin.py:1061,1214; shardformer/shard/shard_config.py:82",
    needed_when="enable_sequence_parallelism without sequence_parallelism_mode",
)
def sequences_have_one_default_mode(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Sequence parallelism without a mode is "all_to_all" with an sp_size, and else "split_gather".

    Without it the plugin makes the groups of the one and shards for the other: an AssertionError with an sp_size, and
    with tensor parallelism RuntimeError: The size of tensor a must match the size of tensor b.
    """
    given = inspect.signature(upstream).bind(self, *args, **kwargs)
    asked = given.arguments
    if asked.get("enable_sequence_parallelism") and asked.get("sequence_parallelism_mode") is None:
        asked["sequence_parallelism_mode"] = "all_to_all" if (asked.get("sp_size") or 1) > 1 else "split_gather"
    upstream(*given.args, **given.kwargs)


@wrap(
    f"{_PLUGIN}:HybridParallelPlugin.enable_lora",
    "1516",
    needed_when="booster.enable_lora with tp_size or pp_size above 1",
)
def adapters_need_a_whole_model(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """LoRA is refused with a sentence where tensor parallelism or a pipeline would cut the model.

    Without it tensor parallelism raises an AssertionError without words, and a pipeline fails when the model is boosted
    (AttributeError: no attribute 'embed_tokens'), for the policies do not look behind peft's wrapper.
    """
    if self.tp_size > 1 or self.pp_size > 1:
        raise ValueError(
            "colossalai does not cut a model with adapters; use tp_size=1 and pp_size=1 with LoRA, not "
            f"tp_size={self.tp_size} and pp_size={self.pp_size}"
        )
    return upstream(self, *args, **kwargs)


@wrap(
    f"{_PLUGIN}:is_distributed_tensor",
    "427,633,892",
    needed_when="gradients of a GPT-2, whose layers are fused ones, are clipped under tensor parallelism",
)
def norms_count_shards_of_fused_layers(upstream: Callable, tensor: torch.Tensor) -> bool:
    """The norm of gradients knows that fused layers are sharded too.

    Without it their shards are taken for what every rank holds: of two ranks each one's square counts half.
    """
    from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor

    return upstream(tensor) or is_customized_distributed_tensor(tensor)


@patch(
    _PLUGIN,
    "156,242,793",
    needed_when="gradients accumulate without no_sync under sequence parallelism (split_gather, ring) or tied weights",
)
def parts_of_gradients_are_added_once(module: ModuleType, replacements: Replacements) -> None:
    """A gradient of which each rank has a part is added over the ranks once for each micro-batch.

    Without it what has accumulated is added after each backward: with two ranks, the first of two micro-batches counts
    twice in the gradients of normalization weights, and of weights that pipeline stages share.
    """
    from fp8booster.colossal.hybrid.gradients import gradients_to_sum, shared_between_stages

    def sums_of(owner: Any, find: Callable[[nn.Module], list], model: nn.Module) -> list:
        return owner.__dict__.setdefault(f"_{find.__name__}", find(model))

    def part(optimizer: Any, parameter: nn.Parameter) -> torch.Tensor | None:
        known = id(parameter) in optimizer.pid_to_grad_store
        return optimizer.get_working_grad_by_param_id(id(parameter)) if known else None

    def backward(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        for find in (gradients_to_sum, shared_between_stages):
            for parameters, sums in sums_of(self.model, find, self.model):
                sums.spread({parameter: parameter.grad for parameter in parameters})
        if isinstance(self, module.HybridParallelZeroOptimizer):
            for parameters, sums in sums_of(self, gradients_to_sum, self.model):
                sums.spread({parameter: part(self, parameter) for parameter in parameters})
        upstream(self, *args, **kwargs)

    def sync(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        find = gradients_to_sum if upstream.__name__ == "sync_sp_grads" else shared_between_stages
        for parameters, sums in sums_of(self, find, self):
            sums.mark(parameters)

    def sync_of_zero(upstream: Callable[..., None], self: Any) -> None:
        upstream(self)
        for parameters, sums in sums_of(self, gradients_to_sum, self.model) if self.require_grad_sync else ():
            sums.mark(parameters)

    for optimizer in ("HybridParallelNaiveOptimizer", "HybridParallelAMPOptimizer", "HybridParallelZeroOptimizer"):
        for name in ("backward", "backward_by_grad"):
            replacements.wrap(module, f"{optimizer}.{name}", backward)
    for name in ("sync_sp_grads", "sync_shared_params"):
        replacements.wrap(module, f"HybridParallelModule.{name}", sync)
    replacements.wrap(module, "HybridParallelZeroOptimizer._sync_sp_grads", sync_of_zero)


@wrap(
    "zero.low_level.low_level_optim:LowLevelZeroOptimizer.__init__",
    "105",
    needed_when="a pipeline stage holds no parameter of the optimizer's first group, or that group is empty",
)
def zero_runs_where_a_group_is_empty(upstream: Callable, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """ZeRO's optimizer can be made on a rank that holds no parameter of the optimizer's first group.

    Without it a pipeline stage that trains nothing, or nothing of that group, raises IndexError: list index out of
    range, and the other stages wait for it for ever.
    """
    groups = optimizer.param_groups
    if not groups[0]["params"]:
        # it reads the dtype there, and drops what is frozen afterwards
        trained = [parameter for group in groups for parameter in group["params"]]
        dtype = trained[0].dtype if trained else torch.float32
        groups[0]["params"] = [nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)]
    upstream(self, optimizer, *args, **kwargs)


@wrap(
    f"{_PLUGIN}:HybridParallelNaiveOptimizer._compute_grad_norm HybridParallelAMPOptimizer._compute_grad_norm "
    "HybridParallelZeroOptimizer._compute_grad_norm",
    "392,595,855",
    needed_when="a pipeline stage has no gradient of a group under ZeRO, or none at all where gradients are clipped",
)
def norms_are_added_without_gradients_too(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> float:
    """A rank without gradients adds zero to their norm over the ranks.

    Without it the rank returns before the reductions, in which the others wait for it for ever.
    """
    given = inspect.signature(upstream).bind(self, *args, **kwargs)
    given.apply_defaults()
    asked = given.arguments
    if asked.get("gradients") or asked.get("param_gradient_pairs"):
        return upstream(self, *args, **kwargs)
    from colossalai.accelerator import get_accelerator

    norm = torch.zeros(1, dtype=torch.float32, device=get_accelerator().get_current_device())
    power = float(asked["norm_type"])
    largest = power == torch.inf
    # in upstream's order; the largest is found within data parallel ranks before
    for group in (None if largest else asked.get("dp_pg"), self.tp_pg, self.pp_pg):
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(norm, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return norm.item() if largest else norm.item() ** (1.0 / power)

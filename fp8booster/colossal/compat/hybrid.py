"""Patches of hybrid parallelism: its plugins, for mixtures of experts too, their optimizers, norms and masters."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.colossal.compat.registry import Replacements, by_name, patch, refuse, wrap
from fp8booster.colossal.sharding import is_transformers_5
from fp8booster.nn.modules import change_class

_PLUGIN = "booster.plugin.hybrid_parallel_plugin"
_MOE_PLUGIN = "booster.plugin.moe_hybrid_parallel_plugin"
_MOE_CONFIGURE = f"{_MOE_PLUGIN}:MoeHybridParallelPlugin.configure"


def _mul_is_out_of_place(module: ModuleType) -> bool:
    from colossalai.tensor.colo_tensor import INPALCE_MAPPING

    return torch.Tensor.mul_ in INPALCE_MAPPING


@wrap(
    "amp.naive_amp.mixed_precision_optimizer:MixedPrecisionOptimizer.__init__",
    "amp/naive_amp/mixed_precision_optimizer.py:84; tensor/colo_tensor.py:6",
    "an optimizer that computes in place, as torch.optim.AdamW does, trains ColoParameters without ZeRO",
    only_if=_mul_is_out_of_place,
)
def masters_are_plain_tensors(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Without it those of ColoParameters (made by native use_fp8) are ColoTensors, whose `mul_` is a `mul`: moments of
    AdamW never decay, and the loss is NaN by the third step.
    """
    from colossalai.tensor.colo_tensor import ColoTensor

    upstream(self, *args, **kwargs)
    for master, working in self.master_to_working_map.items():
        if master is not working and isinstance(master, ColoTensor):
            change_class(master, torch.Tensor)  # keeps its memory and its identity, by which the maps know it


@wrap(
    f"{_PLUGIN}:HybridParallelPlugin.__init__",
    "booster/plugin/hybrid_parallel_plugin.py:1061,1214; shardformer/shard/shard_config.py:82",
    "enable_sequence_parallelism without sequence_parallelism_mode",
)
@by_name
def sequences_have_one_default_mode(call: Callable[[], None], given: dict[str, Any]) -> None:
    """Without it the plugin makes the groups of the one and shards for the other: an AssertionError with an sp_size,
    and with tensor parallelism RuntimeError: The size of tensor a must match the size of tensor b.
    """
    if given.get("enable_sequence_parallelism") and given.get("sequence_parallelism_mode") is None:
        given["sequence_parallelism_mode"] = "all_to_all" if (given.get("sp_size") or 1) > 1 else "split_gather"
    call()


@refuse(f"{_PLUGIN}:HybridParallelPlugin.enable_lora", "1516", "booster.enable_lora with tp_size or pp_size above 1")
def adapters_need_a_whole_model(given: dict[str, Any]) -> str | None:
    """Without it tensor parallelism raises an AssertionError without words, and a pipeline AttributeError: no attribute
    'embed_tokens', for the policies do not look behind peft's wrapper.
    """
    tensor, pipeline = given["self"].tp_size, given["self"].pp_size
    if tensor == pipeline == 1:
        return None
    return (
        "colossalai does not cut a model with adapters; use tp_size=1 and pp_size=1 with LoRA, not "
        f"tp_size={tensor} and pp_size={pipeline}"
    )


@wrap(
    f"{_PLUGIN}:is_distributed_tensor",
    "427,633,892",
    "gradients of a GPT-2, whose layers are fused ones, are clipped under tensor parallelism",
)
def norms_count_shards_of_fused_layers(upstream: Callable, tensor: torch.Tensor) -> bool:
    """Without it shards of fused layers are taken for what every rank holds: each of two ranks' squares counts half."""
    from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor

    return upstream(tensor) or is_customized_distributed_tensor(tensor)


@patch(
    _PLUGIN,
    "156,242,793",
    "gradients accumulate without no_sync under sequence parallelism (split_gather, ring) or tied weights",
)
def parts_of_gradients_are_added_once(module: ModuleType, replacements: Replacements) -> None:
    """Without it what has accumulated is added after each backward: with two ranks, the first of two micro-batches
    counts twice in the gradients of normalization weights, and of weights that pipeline stages share.
    """
    from fp8booster.colossal.hybrid.gradients import partial_sums, stage_sums

    def sums_of(owner: Any, find: Callable[..., list], *arguments: Any) -> list:
        name = f"_{find.__name__}"
        if name not in vars(owner):
            vars(owner)[name] = find(*arguments)
        return vars(owner)[name]

    def sums_of_zero(optimizer: Any) -> list:
        def part(parameter: nn.Parameter) -> torch.Tensor | None:
            known = id(parameter) in optimizer.pid_to_grad_store
            return optimizer.get_working_grad_by_param_id(id(parameter)) if known else None

        return sums_of(optimizer, partial_sums, optimizer.model, part)

    def backward(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        of_zero = sums_of_zero(self) if isinstance(self, module.HybridParallelZeroOptimizer) else ()
        of_model = (sums for find in (partial_sums, stage_sums) for sums in sums_of(self.model, find, self.model))
        for sums in (*of_model, *of_zero):
            sums.spread()
        upstream(self, *args, **kwargs)

    def sync(upstream: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        for sums in sums_of(self, partial_sums if upstream.__name__ == "sync_sp_grads" else stage_sums, self):
            sums.are_summed = True

    def sync_of_zero(upstream: Callable[..., None], self: Any) -> None:
        upstream(self)
        # within `no_sync` upstream adds nothing over ranks
        for sums in sums_of_zero(self) if self.require_grad_sync else ():
            sums.are_summed = True

    for optimizer in ("HybridParallelNaiveOptimizer", "HybridParallelAMPOptimizer", "HybridParallelZeroOptimizer"):
        for name in ("backward", "backward_by_grad"):
            replacements.wrap(module, f"{optimizer}.{name}", backward)
    for name in ("sync_sp_grads", "sync_shared_params"):
        replacements.wrap(module, f"HybridParallelModule.{name}", sync)
    replacements.wrap(module, "HybridParallelZeroOptimizer._sync_sp_grads", sync_of_zero)


@wrap(
    f"{_PLUGIN}:HybridParallelNaiveOptimizer._compute_grad_norm HybridParallelAMPOptimizer._compute_grad_norm "
    "HybridParallelZeroOptimizer._compute_grad_norm",
    "392,595,855",
    "a pipeline stage has no gradient of a group under ZeRO, or none at all where gradients are clipped",
)
@by_name
def norms_are_added_without_gradients_too(call: Callable[[], float], given: dict[str, Any]) -> float:
    """Without it the rank returns before the reductions, in which the others wait for it for ever."""
    if given.get("gradients") or given.get("param_gradient_pairs"):
        return call()
    from colossalai.accelerator import get_accelerator

    # 0 changes neither a sum of powers nor the largest of norms
    norm = torch.zeros(1, dtype=torch.float32, device=get_accelerator().get_current_device())
    optimizer, power = given["self"], float(given.get("norm_type", 2))
    largest = power == torch.inf
    # in upstream's order; the largest is found within data parallel ranks before
    for group in (None if largest else given.get("dp_pg"), optimizer.tp_pg, optimizer.pp_pg):
        if group is not None and dist.get_world_size(group) > 1:
            dist.all_reduce(norm, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return norm.item() if largest else norm.item() ** (1.0 / power)


def _with_split_experts(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Any = None, *args: Any, **kwargs: Any
) -> tuple:
    """Without it: AttributeError: 'MixtralDecoderLayer' object has no attribute 'block_sparse_moe'."""
    from fp8booster.colossal.moe.mixtral import split_experts

    # what spreads experts alone takes them as they are
    if self.tp_size > 1 or self.pp_size > 1:
        # before upstream shards the model and makes masters of the optimizer's parameters
        split_experts(model, optimizer)
    return upstream(self, model, optimizer, *args, **kwargs)


for _name, _where in (
    ("hybrid_parallel_plugin_splits_experts", f"{_PLUGIN}:HybridParallelPlugin.configure"),
    ("moe_hybrid_parallel_plugin_splits_experts", _MOE_CONFIGURE),
):
    wrap(
        _where,
        "shardformer/policies/mixtral.py:133,214",
        "transformers >= 5, and a Mixtral with tp_size or pp_size above 1",
        only_if=lambda module: is_transformers_5(),
        name=_name,
    )(_with_split_experts)


@wrap(
    f"{_MOE_PLUGIN}:MoeHybridParallelPlugin.__init__",
    "337",
    'pp_style="zbv" is given microbatch_size and no num_microbatches',
)
@by_name
def moe_passes_the_size_of_micro_batches_on(call: Callable[[], None], given: dict[str, Any]) -> None:
    """Without it TypeError: unsupported operand type(s) for %: 'int' and 'NoneType', at the first batch."""
    call()
    scheduler = given["self"].scheduler
    if scheduler is not None and getattr(scheduler, "num_microbatch", 0) is None:
        scheduler.microbatch_size = given["microbatch_size"]


@wrap(_MOE_CONFIGURE, "457", "overlap_allgather is on")
def moe_waits_for_gathered_weights(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple:
    """Without it a forward may read weights of the step before: the plugin passes overlap_allgather to the optimizer
    and not to the model's wrapper.
    """
    from colossalai.zero.low_level.zero_hook import wait_all_gather_handle

    def wait(layer: nn.Module, _: tuple) -> None:
        for parameter in layer.parameters(recurse=False):
            wait_all_gather_handle(parameter)

    boosted = upstream(self, *args, **kwargs)
    if self.zero_stage > 0 and self.zero_config["overlap_allgather"]:
        for layer in boosted[0].modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_pre_hook(wait)
    return boosted


@refuse(
    _MOE_CONFIGURE,
    "booster/plugin/moe_hybrid_parallel_plugin.py:438; booster/plugin/hybrid_parallel_plugin.py:173",
    "ep_size > 1 with zero_stage=0",
)
def moe_spreads_experts_with_zero_alone(given: dict[str, Any]) -> str | None:
    """Without it the ranks of pipelines average the gradients of different experts; without a pipeline NameError: name
    'dp_group' is not defined.
    """
    plugin = given["self"]
    trains = given.get("optimizer") is not None or plugin.pp_size == 1  # without a pipeline it fails in any case
    if plugin.ep_size == 1 or plugin.zero_stage > 0 or not trains:
        return None
    return (
        f"experts are spread over {plugin.ep_size} ranks, and without ZeRO colossalai would average their gradients "
        "with those of other experts; use zero_stage=1"
    )


@wrap(
    _MOE_CONFIGURE,
    "booster/plugin/moe_hybrid_parallel_plugin.py:473",
    "gradients are clipped with zero_stage=0, and tp_size or pp_size above 1",
)
def moe_without_zero_clips_by_the_whole_norm(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple:
    """Without it the optimizer is not given the groups of tensor and pipeline parallelism: each rank clips by the norm
    of what it holds, and what ranks hold alike diverges.
    """
    from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer

    boosted = upstream(self, *args, **kwargs)
    optimizer = boosted[1]
    if isinstance(optimizer, HybridParallelAMPOptimizer):
        optimizer.tp_pg, optimizer.tp_size = self.tp_group, self.tp_size
        optimizer.pp_pg, optimizer.pp_size = self.pp_group, self.pp_size
    return boosted

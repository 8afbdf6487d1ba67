"""Mends of shardformer's layers and policies under tensor and sequence parallelism."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch


@mend(
    module="torch.cuda", place="shardformer/modeling/gpt2.py:258, opt.py:208, t5.py:177", needed_when="no CUDA device"
)
def a_cpu_is_no_cuda_device_to_set(module: ModuleType, patch: Patch) -> None:
    """`torch.cuda.set_device` leaves the device as it is when given a CPU.

    Without it GPT-2, OPT and T5 raise ValueError: Expected a cuda device, but got: cpu. No longer needed when
    shardformer's models do not call it.
    """
    if module.is_available():
        return
    upstream = module.set_device

    @functools.wraps(upstream)
    def set_device(device: Any) -> None:
        if not (isinstance(device, torch.device) and device.type == "cpu"):
            upstream(device)

    patch.set(module, "set_device", set_device)


@mend(
    module="colossalai.shardformer.layer._operation",
    place="shardformer/layer/_operation.py:483",
    needed_when='sequence_parallelism_mode="ring"',
)
def ring_gathers_what_others_hold(module: ModuleType, patch: Patch) -> None:
    """The ring of sequence parallelism gathers every rank's part of the input for the weight's gradient.

    Without it the gathered input holds this rank's part in other ranks' places, and weight gradients of column parallel
    layers are wrong. No longer needed when `_ring_as_gather` gives the inputs that an all-gather gives.
    """
    names = module._ring_as_gather.__code__.co_varnames
    if "input_tensors" not in names:
        return
    upstream = module._ring_as_gather

    @functools.wraps(upstream)
    def _ring_as_gather(
        func: Any,
        input_to_gather: dict[str, torch.Tensor],
        input_local: dict[str, torch.Tensor],
        process_group: dist.ProcessGroup | None = None,
        gather_dim: int = 1,
        keep_item: bool = False,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        inputs: list[dict[str, torch.Tensor]] = []

        def apply(**tensors: torch.Tensor) -> torch.Tensor:
            inputs.append({name: tensors[name].clone() for name in input_to_gather})
            return func(**tensors)

        output, _ = upstream(apply, input_to_gather, input_local, process_group, gather_dim, keep_item)
        # the first is this rank's, and the next ranks' follow
        ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        in_order = [inputs[(index - rank) % ranks] for index in range(ranks)]
        gathered = {name: torch.cat([part[name] for part in in_order], gather_dim) for name in input_to_gather}
        return output, gathered

    patch.set_function(module, "_ring_as_gather", _ring_as_gather)


@mend(
    module="colossalai.shardformer.policies.command",
    place="shardformer/policies/command.py:275",
    needed_when='Command-R with sequence_parallelism_mode "split_gather" or "ring"',
)
def norms_of_command_are_added_up(module: ModuleType, patch: Patch) -> None:
    """Command-R's norms, of which each rank sees its part of the sequence, get the whole gradient.

    Without it each rank trains its copy by the tokens that it holds, and the copies part. No longer needed when they
    are marked by `SeqParallelUtils` as those of other models are.
    """
    from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp

    upstream = module.CommandPolicy.postprocess

    @functools.wraps(upstream)
    def postprocess(self) -> Any:
        model = upstream(self)
        if is_share_sp_tp(self.shard_config.sequence_parallelism_mode):
            for name, norm in model.named_modules():
                if name.rpartition(".")[2] in ("input_layernorm", "norm"):
                    for parameter in norm.parameters():
                        SeqParallelUtils.marked_as_sp_partial_derived_param(parameter)
        return model

    patch.set(module.CommandPolicy, "postprocess", postprocess)


@mend(
    module="colossalai.shardformer.policies.opt",
    place="shardformer/policies/opt.py:55",
    needed_when='OPT with transformers\' "sdpa" attention, its default',
)
def opt_is_sharded_with_any_attention(module: ModuleType, patch: Patch) -> None:
    """OPT is sharded whichever attention of transformers it has.

    Without it: KeyError: 'sdpa'. No longer needed when `OPTPolicy.module_policy` knows OPTSdpaAttention.
    """
    from transformers.models.opt import modeling_opt

    upstream, attention = module.OPTPolicy.module_policy, getattr(modeling_opt, "OPTSdpaAttention", None)
    if attention is None:
        return

    @functools.wraps(upstream)
    def module_policy(self) -> dict[Any, Any]:
        config = self.model.config
        if config._attn_implementation != "sdpa":
            return upstream(self)
        config._attn_implementation = "eager"
        try:
            policy = upstream(self)
        finally:
            config._attn_implementation = "sdpa"
        if modeling_opt.OPTAttention in policy:
            policy[attention] = policy.pop(modeling_opt.OPTAttention)
        return policy

    patch.set(module.OPTPolicy, "module_policy", module_policy)


@mend(
    module="colossalai.shardformer.layer.linear",
    place="shardformer/layer/linear.py:477",
    needed_when='sequence_parallelism_mode is "split_gather" or "ring", and a row parallel layer has a bias',
)
def biases_along_a_sequence_are_added_up(module: ModuleType, patch: Patch) -> None:
    """The bias of a row parallel layer, which each rank adds to its part of the sequence, gets the whole gradient.

    Without it each rank trains its copy by the tokens that it holds, and the copies part. No longer needed when
    `SeqParallelUtils.is_sp_partial_derived_param(Linear1D_Row(..., seq_parallel_mode="split_gather").bias)`.
    """
    _mark_biases(patch, module.Linear1D_Row)


@mend(
    module="colossalai.shardformer.layer.qkv_fused_linear",
    place="shardformer/layer/qkv_fused_linear.py:521,1086",
    needed_when='sequence_parallelism_mode is "split_gather" or "ring", as in GPT-2, whose layers have biases',
)
def biases_of_fused_layers_are_added_up(module: ModuleType, patch: Patch) -> None:
    """The same for fused layers and GPT-2's.

    Without it each rank trains its copy by the tokens that it holds, and the copies part. No longer needed when
    `GPT2FusedLinearConv1D_Row(..., seq_parallel_mode="split_gather").bias` is marked as partially derived.
    """
    _mark_biases(patch, module.FusedLinear1D_Row, module.GPT2FusedLinearConv1D_Row)


def _mark_biases(patch: Patch, *classes: type) -> None:
    from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp

    def marking(upstream: Any) -> Any:
        @functools.wraps(upstream)
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            upstream(self, *args, **kwargs)
            if self.bias is not None and is_share_sp_tp(self.seq_parallel_mode):
                SeqParallelUtils.marked_as_sp_partial_derived_param(self.bias)

        return __init__

    for cls in classes:
        patch.set(cls, "__init__", marking(cls.__init__))


@mend(
    module="colossalai.shardformer.layer.normalization",
    place="shardformer/layer/normalization.py:333,275",
    needed_when="enable_fused_normalization and apex is not installed",
)
def norms_are_fused_where_apex_is(module: ModuleType, patch: Patch) -> None:
    """`enable_fused_normalization` without apex keeps the model's norms, marked for sequence parallelism as they must.

    Without it: TypeError: 'NoneType' object is not callable, NameError: FusedLayerNormWithHook, or norms whose
    gradients the ranks of split_gather do not add up. No longer needed when `FusedRMSNorm.from_native_module` returns
    without apex.
    """
    if module.FusedRMSNormWithHook is None:
        patch.set(module.FusedRMSNorm, "from_native_module", staticmethod(module.RMSNorm.from_native_module))
    if not hasattr(module, "FusedLayerNormWithHook"):
        patch.set(module.FusedLayerNorm, "from_native_module", staticmethod(module.LayerNorm.from_native_module))


@mend(
    module="colossalai.shardformer.layer.qkv_fused_linear",
    place="shardformer/layer/qkv_fused_linear.py:125",
    needed_when="no CUDA device",
)
def fused_weights_are_gathered_on_cpu(module: ModuleType, patch: Patch) -> None:
    """Fused q, k, v weights are gathered, as for a checkpoint, on the device that they are on.

    Without it: AssertionError: Torch not compiled with CUDA enabled, or no NVIDIA driver. No longer needed when
    `gather_fused_qkv_in_gpt2_style` returns on a machine without a GPU.
    """
    if torch.cuda.is_available():
        return

    def gather_fused_qkv_in_gpt2_style(
        qkv: torch.Tensor, split_sizes: list[int], process_group: dist.ProcessGroup, is_transposed: bool = False
    ) -> torch.Tensor:
        ranks, dimension = dist.get_world_size(process_group), -1 if is_transposed else 0
        parts = [torch.empty_like(qkv, memory_format=torch.contiguous_format) for _ in range(ranks)]
        dist.all_gather(parts, qkv.contiguous(), group=process_group)
        pieces = [part.split([size // ranks for size in split_sizes], dimension) for part in parts]
        # all ranks' q, then all ranks' k, then all ranks' v
        return torch.cat([piece for fused in zip(*pieces, strict=True) for piece in fused], dimension)

    patch.set_function(module, "gather_fused_qkv_in_gpt2_style", gather_fused_qkv_in_gpt2_style)

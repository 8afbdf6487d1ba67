"""Which gradients of a sharded model need care beyond the mean over data parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor
from torch import nn

from fp8booster.colossal.hybrid.sums import SummedGradients

Parameters = list[nn.Parameter]


def is_replicated(parameter: torch.Tensor) -> bool:
    """Whether every rank of the tensor parallel group holds the whole parameter.

    The ranks must round its gradient alike, or their copies part: it may share no scale with a shard's gradient.
    """
    # fused layers, as GPT-2's, are sharded by a function of their own
    return not (is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter))


def gradients_to_sum(model: nn.Module) -> list[tuple[Parameters, SummedGradients]]:
    """Parameters of a `HybridParallelModule` whose gradients are parts of a sum under sequence parallelism."""
    config = model.shard_config
    ranks = dist.get_world_size(model.tp_group)
    if ranks == 1 or not config.enable_sequence_parallelism or not is_share_sp_tp(config.sequence_parallelism_mode):
        return []
    partial = [parameter for parameter in model.parameters() if SeqParallelUtils.is_sp_partial_derived_param(parameter)]
    return [(partial, SummedGradients(model.tp_group))]


def shared_between_stages(model: nn.Module) -> list[tuple[Parameters, SummedGradients]]:
    """Parameters of a `HybridParallelModule` that another pipeline stage holds too, by the group of these stages."""
    return [
        ([by_stage[model.stage_manager.stage]], SummedGradients(group))
        for by_stage, group in zip(model.shared_params, model.shared_param_process_groups, strict=False)
        if model.stage_manager.stage in by_stage
    ]

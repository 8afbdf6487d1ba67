"""Gradients of a sharded model that are more than a mean over data parallel ranks, and the norm of all.

Colossal-AI adds the square of a gradient that every rank of tensor parallelism holds as many times less as there are
ranks, and that of a weight which pipeline stages share as many times less as there are stages, so that the sum over all
ranks has each once (hybrid_parallel_plugin.py:584, 842). It reads each sum back, and there the host waits for the
device. Here the same sums stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.shardformer.layer.utils import SeqParallelUtils, is_share_sp_tp
from colossalai.tensor.d_tensor.api import is_customized_distributed_tensor, is_distributed_tensor
from torch import nn

from fp8booster.colossal.hybrid.sums import GradientOf, SummedGradients
from fp8booster.comm.encoding import DEFAULT, Encoding


def is_replicated(parameter: torch.Tensor) -> bool:
    """Tell whether every rank of the tensor parallel group holds the whole parameter.

    The ranks must round its gradient alike, or their copies diverge: it may share no scale with a shard's gradient.
    """
    # fused layers, as GPT-2's, are sharded by a function of their own
    return not (is_distributed_tensor(parameter) or is_customized_distributed_tensor(parameter))


def partial_sums(
    model: nn.Module, gradient_of: GradientOf = attrgetter("grad"), encoding: Encoding = DEFAULT
) -> list[SummedGradients]:
    """Return the gradients of a `HybridParallelModule` of which each rank has a part under sequence parallelism."""
    config = model.shard_config
    ranks = dist.get_world_size(model.tp_group)
    # in other modes the ranks of a sequence are among those that data parallelism averages over
    if ranks == 1 or not config.enable_sequence_parallelism or not is_share_sp_tp(config.sequence_parallelism_mode):
        return []
    # a rank's gradient of such a weight, as a norm's, comes from its tokens alone; others are whole behind an exchange
    partial = [parameter for parameter in model.parameters() if SeqParallelUtils.is_sp_partial_derived_param(parameter)]
    return [SummedGradients(model.tp_group, partial, gradient_of, encoding)]


def stage_sums(
    model: nn.Module, gradient_of: GradientOf = attrgetter("grad"), encoding: Encoding = DEFAULT
) -> list[SummedGradients]:
    """Return the gradients of a `HybridParallelModule` of which another pipeline stage has a part too."""
    return [
        SummedGradients(group, [by_stage[model.stage_manager.stage]], gradient_of, encoding)
        for by_stage, group in zip(model.shared_params, model.shared_param_process_groups, strict=False)
        if model.stage_manager.stage in by_stage
    ]


class SharedSquares:
    """Sums of squares over tensor and pipeline parallel ranks, in which what ranks hold in common counts once.

    Args:
        optimizer: Colossal-AI's for hybrid parallelism, whose groups and shared parameters are read.
    """

    def __init__(self, optimizer: Any) -> None:
        self._replicas = _ranks(optimizer.tp_pg)
        self._groups = [group for group in (optimizer.tp_pg, optimizer.pp_pg) if _ranks(group) > 1]
        shared = optimizer.shared_params if _ranks(optimizer.pp_pg) > 1 else []
        self._stages = {
            by_stage[optimizer.stage_manager.stage]: len(by_stage)
            for by_stage in shared
            if optimizer.stage_manager.stage in by_stage
        }
        """The number of pipeline stages that hold a parameter, where it is more than one."""

    def own(self, norms: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> torch.Tensor:
        """Return the sum that this rank adds: float32 [].

        Args:
            norms: each parameter, and the norm of its gradient or of this rank's part of it, float32 [].
        """
        # one sum for each number of holders: few kernels, and no division of single squares
        by_holders: dict[int, list[torch.Tensor]] = {}
        for parameter, norm in norms:
            replicas = self._replicas if is_replicated(parameter) else 1
            by_holders.setdefault(replicas * self._stages.get(parameter, 1), []).append(norm)
        total = torch.zeros((), dtype=torch.float32, device=get_accelerator().get_current_device())
        for holders, of_these in by_holders.items():
            # a square counts on each holder, and the sum over ranks makes one of them
            total.add_(torch.stack(of_these).square().sum(), alpha=1 / holders)
        return total

    def add_over_ranks(self, squares: torch.Tensor) -> None:
        """Add sums over tensor and pipeline parallel ranks, in place; each rank calls it, with gradients or without."""
        # in 32 bits: a norm that ranks round differently would let their clipping diverge
        for group in self._groups:
            dist.all_reduce(squares, group=group)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)

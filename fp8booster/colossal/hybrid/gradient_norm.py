"""The norm of gradients of which ranks hold some in common, found on the device.

Colossal-AI adds the square of a gradient that every rank of tensor parallelism holds as many times less as there are
ranks, and that of a weight which pipeline stages share as many times less as there are stages, so that the sum over all
ranks has each once (hybrid_parallel_plugin.py:584, 842). It reads each sum back, and there the host waits for the
device. Here the same sums stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer, HybridParallelZeroOptimizer
from torch import nn

from fp8booster.colossal.hybrid.gradients import is_replicated

Norms = Iterable[tuple[nn.Parameter, torch.Tensor]]
"""(parameter, the norm of its gradient or of this rank's part of it: float32 [])."""


class SharedSquares:
    """Sums of squares over tensor and pipeline parallel ranks, in which what ranks hold in common counts once.

    Args:
        optimizer: whose groups and shared parameters are read.
    """

    def __init__(self, optimizer: HybridParallelAMPOptimizer | HybridParallelZeroOptimizer) -> None:
        self._replicas = _ranks(optimizer.tp_pg)
        self._groups = [group for group in (optimizer.tp_pg, optimizer.pp_pg) if _ranks(group) > 1]
        shared = optimizer.shared_params if _ranks(optimizer.pp_pg) > 1 else []
        self._stages = {
            by_stage[optimizer.stage_manager.stage]: len(by_stage)
            for by_stage in shared
            if optimizer.stage_manager.stage in by_stage
        }
        """How many pipeline stages hold a parameter, where it is more than one."""

    def own(self, norms: Norms) -> torch.Tensor:
        """The sum that this rank adds: float32 []."""
        by_holders: dict[int, list[torch.Tensor]] = {}
        for parameter, norm in norms:
            by_holders.setdefault(self._holders(parameter), []).append(norm)
        total = torch.zeros((), dtype=torch.float32, device=get_accelerator().get_current_device())
        for holders, of_these in by_holders.items():
            total.add_(torch.stack(of_these).square().sum(), alpha=1 / holders)
        return total

    def add_over_ranks(self, squares: torch.Tensor) -> None:
        """Add sums over tensor and pipeline parallel ranks, in place; each rank calls it, with gradients or without."""
        for group in self._groups:
            dist.all_reduce(squares, group=group)

    def _holders(self, parameter: nn.Parameter) -> int:
        """How many ranks of one replica hold the same of a parameter."""
        replicas = self._replicas if is_replicated(parameter) else 1
        return replicas * self._stages.get(parameter, 1)


def _ranks(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)

"""Colossal-AI's ZeRO optimizer for mixtures of experts, sending FP8."""

from __future__ import annotations

import torch
from colossalai.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelZeroOptimizer
from colossalai.tensor.moe_tensor.api import is_moe_tensor

from fp8booster.colossal.hybrid.optimizer import FP8HybridParallelZeroOptimizer


class FP8MoeHybridParallelZeroOptimizer(FP8HybridParallelZeroOptimizer, MoeHybridParallelZeroOptimizer):
    """The optimizer of ZeRO stage 1, over two groups.

    Experts' parameters over the ranks that hold the same experts, all others over all data parallel ranks.
    """

    def _sync_grad(self) -> None:
        """As in Colossal-AI (zero/low_level/low_level_optim.py:723): what hooks left, and zeros for experts without a
        gradient.

        Colossal-AI takes an expert whose gradient the hooks have reduced for one without, and reduces zeros for it.
        """
        for group_id, parameters in self._working_param_groups.items():
            for parameter in parameters:
                if not parameter.requires_grad:
                    continue
                if (
                    parameter.grad is None
                    and is_moe_tensor(parameter)
                    and not self.pid_to_grad_store[id(parameter)].holds(group_id, id(parameter))
                ):
                    parameter.grad = torch.zeros_like(parameter)
                if parameter.grad is not None:
                    self._add_to_bucket(parameter, group_id)
        self._run_reduction()

"""Colossal-AI's ZeRO optimizer for mixtures of experts, sending FP8."""

from __future__ import annotations

from colossalai.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelZeroOptimizer

from fp8booster.colossal.hybrid.optimizer import FP8HybridParallelZeroOptimizer


class FP8MoeHybridParallelZeroOptimizer(FP8HybridParallelZeroOptimizer, MoeHybridParallelZeroOptimizer):
    """The optimizer of ZeRO stage 1, over two groups.

    Experts' parameters over the ranks that hold the same experts, all others over all data parallel ranks.
    """

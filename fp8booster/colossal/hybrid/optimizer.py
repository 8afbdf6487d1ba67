"""Colossal-AI's optimizers for hybrid parallelism, whose gradients travel in FP8."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.booster.plugin.hybrid_parallel_plugin import (
    HybridParallelAMPOptimizer,
    HybridParallelZeroOptimizer,
)
from colossalai.zero.low_level.bookkeeping import BucketStore
from torch import nn

from fp8booster.colossal.hybrid.gradients import gradients_to_sum, is_replicated, shared_between_stages
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer


class FP8HybridParallelAMPOptimizer(HybridParallelAMPOptimizer):
    """The optimizer without ZeRO: the model wrapper reduces the gradients."""

    @classmethod
    def take_over(cls, optimizer: HybridParallelAMPOptimizer) -> None:
        """Turn an optimizer over an `FP8HybridParallelModule` into this class in place."""
        optimizer.__class__ = cls

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward from a loss; errors and arguments as in native."""
        self.model.spread_sums()
        super().backward(loss, *args, **kwargs)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward from a tensor's gradient, as pipelines do it."""
        self.model.spread_sums()
        super().backward_by_grad(tensor, grad, *args, **kwargs)


class FP8HybridParallelZeroOptimizer(FP8ZeroOptimizer, HybridParallelZeroOptimizer):
    """The optimizer of ZeRO stages 1 and 2 within tensor, sequence and pipeline parallelism."""

    _norm = FP8ZeroOptimizer._native_norm  # which counts what ranks share once
    norms_beside_backward = False

    @classmethod
    def take_over(
        cls, optimizer: HybridParallelZeroOptimizer, model: nn.Module, gradient_scaling: str
    ) -> None:
        """As in `FP8ZeroOptimizer`; `optimizer.model` is the model's wrapper."""
        super().take_over(optimizer, model, gradient_scaling)
        optimizer.partial_sums = gradients_to_sum(optimizer.model)
        optimizer.stage_sums = shared_between_stages(optimizer.model)
        if optimizer.tp_pg.size() > 1:
            optimizer._put_replicated_apart()

    def _put_replicated_apart(self) -> None:
        """Give the gradients of parameters that every tensor parallel rank holds buckets of their own."""
        for group, parameters in self.pg_to_param_list.items():
            bucket = BucketStore(group, self._reduce_bucket_size)
            self.pg_to_bucket_store["replicated", group] = bucket
            for parameter in filter(is_replicated, parameters):
                self.pid_to_bucket_store[id(parameter)] = bucket

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward from a loss; errors and arguments as in native."""
        self._spread_sums()
        super().backward(loss, *args, **kwargs)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward from a tensor's gradient, as pipelines do it."""
        self._spread_sums()
        super().backward_by_grad(tensor, grad, *args, **kwargs)

    def _spread_sums(self) -> None:
        self.model.spread_sums()
        for parameters, sums in (*self.partial_sums, *self.stage_sums):
            sums.spread(self._parts(parameters))

    def _sync_sp_grads(self) -> None:
        """Add, over the ranks of sequence parallelism, gradients of which each has a part."""
        if self.require_grad_sync:
            for parameters, sums in self.partial_sums:
                sums.sum(self._parts(parameters))

    def sync_dp_grads(self) -> None:
        """Average what a pipeline's backward left over data parallel ranks, then add what its stages share."""
        super().sync_dp_grads()
        for parameters, sums in self.stage_sums:
            sums.sum(self._parts(parameters))

    def _parts(self, parameters: list[nn.Parameter]) -> dict[torch.Tensor, torch.Tensor | None]:
        """This rank's part of the reduced gradient of each parameter that this optimizer trains."""
        return {
            parameter: self.get_working_grad_by_param_id(id(parameter))
            for parameter in parameters
            if id(parameter) in self.pid_to_grad_store
        }

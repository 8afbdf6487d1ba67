"""Colossal-AI's optimizers for hybrid parallelism, whose gradients are sent in FP8.

Their norms stay on the device, so that no step makes the host wait for it; `get_grad_norm` does.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer, HybridParallelZeroOptimizer
from colossalai.booster.plugin.moe_hybrid_parallel_plugin import MoeHybridParallelZeroOptimizer
from colossalai.zero.low_level.bookkeeping import BucketStore
from torch import nn

from fp8booster.colossal.boosted_optimizer import BoostedOptimizer
from fp8booster.colossal.hybrid.gradients import SharedSquares, is_replicated, partial_sums, stage_sums
from fp8booster.colossal.hybrid.model import FP8HybridParallelModule
from fp8booster.colossal.hybrid.sums import SummedGradients
from fp8booster.colossal.zero.buckets import GradientBucket
from fp8booster.colossal.zero.noted_norms import forget_norm, noted_norms
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.config import FP8Config
from fp8booster.kernels.norms import norms_of
from fp8booster.nn.modules import change_class
from fp8booster.optim import one_pass
from fp8booster.optim.steps import clipping_divisor


class _SpreadsSums:
    """A mixin before an optimizer over an `FP8HybridParallelModule`."""

    model: FP8HybridParallelModule
    shared_squares: SharedSquares

    def spread_sums(self) -> None:
        """Prepare gradients that are sums over ranks for a backward that adds to them."""
        self.model.spread_sums()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss; errors and arguments as in Colossal-AI's."""
        self.spread_sums()
        super().backward(*args, **kwargs)

    def backward_by_grad(self, *args: Any, **kwargs: Any) -> None:
        """Run backward from a tensor's gradient, as pipelines do it."""
        self.spread_sums()
        super().backward_by_grad(*args, **kwargs)


class FP8HybridParallelAMPOptimizer(_SpreadsSums, BoostedOptimizer, HybridParallelAMPOptimizer):
    """The optimizer without ZeRO: the model wrapper reduces the gradients."""

    @classmethod
    def convert_in_place(cls, optimizer: HybridParallelAMPOptimizer) -> None:
        """Turn an optimizer over an `FP8HybridParallelModule` into this class in place."""
        change_class(optimizer, cls)
        optimizer.trained = optimizer.model
        optimizer.shared_squares = SharedSquares(optimizer)

    def _compute_grad_norm(
        self, param_gradient_pairs: list[tuple[nn.Parameter, torch.Tensor]], norm_type: float = 2
    ) -> torch.Tensor | float:
        """Return the norm of (parameter, gradient of its master) over all ranks: float32 [], on the device."""
        if norm_type != 2:  # rare: Colossal-AI's waits for the device
            return super()._compute_grad_norm(param_gradient_pairs, norm_type)
        parameters = [parameter for parameter, _ in param_gradient_pairs]
        norms = norms_of([gradient for _, gradient in param_gradient_pairs])
        squares = self.shared_squares.own(zip(parameters, norms, strict=True))
        self.shared_squares.add_over_ranks(squares)
        return squares.sqrt()

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Update the masters and the weights that are copies of them; arguments as in Colossal-AI's.

        Where the optimizer inside can, it is one pass over memory, by gradients as backward left them: Colossal-AI's
        step makes each of them a copy in FP32, divides it and launches a copy for each weight
        (amp/naive_amp/mixed_precision_optimizer.py:148).
        """
        if args or kwargs or self.why_by_itself() is not None:
            super().step(*args, **kwargs)
            return
        if self.mixed_precision.should_skip_step():
            self.zero_grad()
            return
        groups = [
            [
                (master, working)
                for master in group["params"]
                if (working := self.master_to_working_map[master]).grad is not None
            ]
            for group in self.optim.param_groups
        ]
        if self.max_norm > 0:
            workings = [working for pairs in groups for _, working in pairs]
            self._current_grad_norm = self._compute_grad_norm([(each, each.grad) for each in workings])
        divisor = self._divisor(self._current_grad_norm)
        for group, pairs in zip(self.optim.param_groups, groups, strict=True):
            gradients = [cast(torch.Tensor, working.grad) for _, working in pairs]
            one_pass.step_group(self.optim, group, [master for master, _ in pairs], gradients, divisor)
        one_pass.step_of_nothing(self.optim)
        copies = [pair for pairs in groups for pair in pairs if pair[0] is not pair[1]]
        if copies:  # of no tensors the call is refused
            with torch.no_grad():
                torch._foreach_copy_([working for _, working in copies], [master for master, _ in copies])
        for _, working in copies:
            working.grad = None

    def _divisor(self, total_norm: Any) -> torch.Tensor | None:
        """Return what undoes the loss scale and clips by a norm: float32 []; None where it is one."""
        scale = self.mixed_precision.get_grad_div_scale()
        if self.max_norm > 0:
            return clipping_divisor(total_norm, scale, self.max_norm)
        if scale == 1:
            return None
        # filled on the device: the host would wait for a copy
        return torch.full((), scale, dtype=torch.float32, device=get_accelerator().get_current_device())

    def _unscale_and_clip_grads(self, total_norm: torch.Tensor | float) -> None:
        """Undo the loss scale and clip, in one pass, and in none where both leave gradients alone."""
        divisor = self._divisor(total_norm)
        if divisor is None:
            return
        # all at once by one foreach call: Colossal-AI's loop launches a kernel for each
        masters = [master for group in self.param_groups for master in group["params"]]
        gradients = [master.grad for master in masters if master.grad is not None]
        if gradients:
            torch._foreach_div_(gradients, divisor)


class FP8HybridParallelZeroOptimizer(_SpreadsSums, FP8ZeroOptimizer, HybridParallelZeroOptimizer):
    """The optimizer of ZeRO stages 1 and 2 within tensor, sequence and pipeline parallelism."""

    partial_sums: list[SummedGradients]
    stage_sums: list[SummedGradients]
    """The model's attribute of this name, for this rank's parts of gradients that are reduced already."""

    @classmethod
    def convert_in_place(cls, optimizer: HybridParallelZeroOptimizer, model: nn.Module, config: FP8Config) -> None:
        """Convert as in `FP8ZeroOptimizer`; `optimizer.model` is the model's wrapper."""
        super().convert_in_place(optimizer, model, config)
        # with `_part`: ZeRO has taken the gradients out of `.grad` by the time that they are summed
        optimizer.partial_sums = partial_sums(optimizer.model, optimizer._part, optimizer.gradient_encoding)
        optimizer.stage_sums = stage_sums(optimizer.model, optimizer._part, optimizer.gradient_encoding)
        optimizer.shared_squares = SharedSquares(optimizer)
        if optimizer.tp_pg.size() > 1:
            optimizer._put_replicated_apart()

    def _put_replicated_apart(self) -> None:
        """Give the gradients of parameters that every tensor parallel rank holds buckets of their own."""
        for group, parameters in self.pg_to_param_list.items():
            # beside gradients of shards in a block they would have another scale on each rank, and the copies diverge
            bucket = GradientBucket.convert_in_place(BucketStore(group, self._reduce_bucket_size))
            self.pg_to_bucket_store["replicated", group] = bucket
            for parameter in filter(is_replicated, parameters):
                self.pid_to_bucket_store[id(parameter)] = bucket

    def spread_sums(self) -> None:
        super().spread_sums()
        for sums in (*self.partial_sums, *self.stage_sums):
            sums.spread()

    def _sync_sp_grads(self) -> None:
        """Add, over the ranks of sequence parallelism, gradients of which each has a part."""
        # within `no_sync` parts stay parts, and one sum at the end has all micro-batches
        if self.require_grad_sync:
            self._sum(self.partial_sums)

    def sync_dp_grads(self) -> None:
        """Average what a pipeline's backward left over data parallel ranks, then add what its stages share."""
        super().sync_dp_grads()
        self._sum(self.stage_sums)

    def _sum(self, all_sums: list[SummedGradients]) -> None:
        for sums in all_sums:
            for part in sums.sum():
                forget_norm(part)  # kernels write past torch's count of changes

    def _norm(self) -> torch.Tensor:
        """Return the norm of all gradients over all ranks, times the loss scale: float32 [], on the device.

        Colossal-AI adds up norms where there are two process groups, as with experts, and leaves out those that other
        ranks hold (low_level_optim.py:575), so that ranks clip by different norms. Here it is one norm.
        """
        gradients = self._gradients()
        norms = noted_norms(list(gradients.values()))
        squares = self.shared_squares.own(zip((each.working for each in gradients), norms, strict=True))
        # in the widest group no two ranks hold a part of the same: those of experts lie within it
        ranks = max(self.pg_to_grad_store, key=dist.get_world_size)
        # over one rank it changes nothing, and costs the host a launch
        if dist.get_world_size(ranks) > 1:
            dist.all_reduce(squares, group=ranks)
        self.shared_squares.add_over_ranks(squares)
        return squares.sqrt()

    def _part(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return this rank's part of the reduced gradient of a parameter; None where this optimizer trains none."""
        if id(parameter) not in self.pid_to_grad_store:
            return None
        return self.get_working_grad_by_param_id(id(parameter))


class FP8MoeHybridParallelZeroOptimizer(FP8HybridParallelZeroOptimizer, MoeHybridParallelZeroOptimizer):
    """The optimizer of ZeRO stage 1 with experts that are spread over ranks.

    Gradients of experts are reduced over the ranks that hold the same experts, others over all data parallel ranks.
    """

"""Colossal-AI's model wrapper for hybrid parallelism, whose gradients are reduced in FP8.

Where Colossal-AI sends the gradient of each parameter alone, these are sent together in large messages. A gradient that
pipeline stages share is averaged over data parallel ranks first and added over the stages then, not in the opposite
order: so all of these stages hold the same bits of it, whatever is sent with it in the messages of each.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule
from colossalai.interface import OptimizerWrapper
from colossalai.zero.low_level import LowLevelZeroOptimizer

from fp8booster import comm
from fp8booster.colossal.hybrid.gradients import is_replicated, partial_sums, stage_sums
from fp8booster.colossal.hybrid.sums import SummedGradients
from fp8booster.colossal.zero.model import SavesMasters
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.nn.modules import change_class


class FP8HybridParallelModule(SavesMasters, HybridParallelModule):
    """The model wrapper of a plugin that sends gradients in FP8."""

    encoding: comm.Encoding
    partial_sums: list[SummedGradients]
    stage_sums: list[SummedGradients]

    @classmethod
    def convert_in_place(
        cls, model: HybridParallelModule, optimizer: OptimizerWrapper | None, encoding: comm.Encoding
    ) -> None:
        """Turn a model wrapper into this class in place.

        Args:
            model: made by Colossal-AI's plugin, or of this class already: a model is not wrapped twice, and a DDP
                takes one hook.
            optimizer: what trains it; None where nothing does.
            encoding: of gradients.
        """
        # asked before the class changes
        is_new = not isinstance(model, cls)
        change_class(model, cls)
        ranks = dist.get_world_size(model.dp_group)
        if model.use_ddp and (ranks == 1 or isinstance(optimizer, LowLevelZeroOptimizer)):
            # Colossal-AI wraps in DDP wherever one rank holds a replica (hybrid_parallel_plugin.py:1311). There is
            # nothing to average then, or ZeRO does; and at the end of backward DDP gives parameters once more the
            # gradients that ZeRO has taken
            model.module, model.use_ddp = model.module.module, False
        model.set_zero_optimizer(optimizer if isinstance(optimizer, FP8ZeroOptimizer) else None)
        model.encoding = encoding
        model.partial_sums = partial_sums(model, encoding=encoding)
        model.stage_sums = stage_sums(model, encoding=encoding)
        if is_new and model.use_ddp:
            # without tensor parallelism no rank holds a copy that could diverge, and one message for all is cheaper
            apart = is_replicated if dist.get_world_size(model.tp_group) > 1 else None
            state = comm.DDPState(group=model.dp_group, apart=apart, encoding=encoding)
            model.module.register_comm_hook(state, comm.ddp_hook)

    def spread_sums(self) -> None:
        """Prepare gradients that are sums over ranks for a backward that adds to them."""
        for sums in (*self.partial_sums, *self.stage_sums):
            sums.spread()

    def sync_sp_grads(self, grads: list[torch.Tensor] | None = None) -> None:
        """Add, over the ranks of sequence parallelism, gradients of which each has a part."""
        if grads is not None:
            comm.all_reduce_coalesced(grads, dist.ReduceOp.SUM, self.tp_group, encoding=self.encoding)
            return
        for sums in self.partial_sums:
            sums.sum()

    def sync_shared_params(self) -> None:
        """Do nothing: pipeline stages add the gradients that they share at the end of `sync_dp_grads`."""

    def sync_dp_grads(self) -> None:
        """Average gradients over data parallel ranks, then add those that pipeline stages share."""
        if dist.get_world_size(self.dp_group) > 1:
            named = self.module.named_parameters()
            trained = {name: parameter for name, parameter in named if parameter.grad is not None}
            # apart: ranks of tensor parallelism hold copies of the first, which must be rounded alike on each
            for replicated in (True, False):
                part = {name: each.grad for name, each in trained.items() if is_replicated(each) is replicated}
                comm.all_reduce_coalesced(
                    [*part.values()], dist.ReduceOp.AVG, self.dp_group, encoding=self.encoding, of=[*part]
                )
        for sums in self.stage_sums:
            sums.sum()

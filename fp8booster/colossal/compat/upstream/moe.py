"""Patches of Colossal-AI's MoeHybridParallelPlugin."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fp8booster.colossal.compat.registry import wrap
from fp8booster.colossal.temporarily import temporarily

_CONFIGURE = "booster.plugin.moe_hybrid_parallel_plugin:MoeHybridParallelPlugin.configure"
_CHECKPOINTS = "checkpoint_io.moe_checkpoint:MoECheckpointIO."


@wrap(
    "booster.plugin.moe_hybrid_parallel_plugin:MoeHybridParallelPlugin.__init__",
    "337",
    needed_when='pp_style="zbv" is given microbatch_size and no num_microbatches',
)
def moe_passes_the_size_of_micro_batches_on(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """MoeHybridParallelPlugin gives the zero-bubble schedule the size of micro-batches, as HybridParallelPlugin does.

    Without it TypeError: unsupported operand type(s) for %: 'int' and 'NoneType', at the first batch.
    """
    upstream(self, *args, **kwargs)
    if self.scheduler is not None and getattr(self.scheduler, "num_microbatch", 0) is None:
        given = inspect.signature(upstream).bind(self, *args, **kwargs).arguments
        self.scheduler.microbatch_size = given["microbatch_size"]


@wrap(_CONFIGURE, "457", needed_when="overlap_allgather is on")
def moe_waits_for_gathered_weights(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple:
    """MoeHybridParallelPlugin's modules wait for the weights that ZeRO still gathers when they run.

    Without it the plugin passes overlap_allgather to the optimizer and not to the model's wrapper, so that nothing
    waits, and a forward may read weights of the step before.
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


@wrap(
    _CONFIGURE,
    "booster/plugin/moe_hybrid_parallel_plugin.py:438; booster/plugin/hybrid_parallel_plugin.py:173",
    needed_when="ep_size > 1 with zero_stage=0",
)
def moe_spreads_experts_with_zero_alone(
    upstream: Callable, self: Any, model: nn.Module, optimizer: Any = None, *args: Any, **kwargs: Any
) -> tuple:
    """Training without ZeRO is refused for experts that are spread over ranks, since their gradients would be mixed.

    Without it the ranks of pipelines average the gradients of different experts, each of which its rank alone holds;
    without a pipeline NameError: name 'dp_group' is not defined.
    """
    trains = optimizer is not None or self.pp_size == 1  # without a pipeline it fails in any case
    if self.ep_size > 1 and self.zero_stage == 0 and trains:
        raise ValueError(
            f"experts are spread over {self.ep_size} ranks, and without ZeRO colossalai would average their "
            "gradients with those of other experts; use zero_stage=1"
        )
    return upstream(self, model, optimizer, *args, **kwargs)


@wrap(
    _CONFIGURE,
    "booster/plugin/moe_hybrid_parallel_plugin.py:473",
    needed_when="gradients are clipped with zero_stage=0, and tp_size or pp_size above 1",
)
def moe_without_zero_clips_by_the_whole_norm(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> tuple:
    """MoeHybridParallelPlugin without ZeRO clips by the norm of the whole gradient, the same on every rank.

    Without it the optimizer is not given the groups of tensor and pipeline parallelism, so that each rank clips by the
    norm of what it holds, and what ranks hold alike diverges.
    """
    from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer

    boosted = upstream(self, *args, **kwargs)
    optimizer = boosted[1]
    if isinstance(optimizer, HybridParallelAMPOptimizer):
        optimizer.tp_pg, optimizer.tp_size = self.tp_group, self.tp_size
        optimizer.pp_pg, optimizer.pp_size = self.pp_group, self.pp_size
    return boosted


@wrap(
    f"{_CHECKPOINTS}save_unsharded_model MoECheckpointIO.save_unsharded_optimizer",
    "680,719,741",
    needed_when="experts are spread over ranks, and a checkpoint is to be one file",
)
def moe_saves_spread_experts_in_shards(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Saving a model whose experts are spread over ranks to one file is refused, since the file would be wrong.

    Without it the first rank's experts are written with those of other ranks behind them in the same tensor, and the
    others' are missing.
    """
    if self.ep_size > 1:
        raise ValueError(
            f"experts are spread over {self.ep_size} ranks, and colossalai cannot write them to one file; save with "
            "shard=True"
        )
    upstream(self, *args, **kwargs)


@wrap(
    f"{_CHECKPOINTS}save_sharded_model MoECheckpointIO.save_unsharded_model",
    "116,686",
    needed_when="overlap_allgather is on, or weights are sent in FP8",
)
def moe_waits_before_saving(upstream: Callable, self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """MoECheckpointIO makes the model's weights ready before it reads them, as the other plugins' checkpoints do.

    Without it weights that ZeRO still gathers are saved as they are by then.
    """
    model._force_wait_all_gather()
    upstream(self, model, *args, **kwargs)


@wrap(
    f"{_CHECKPOINTS}_model_sharder",
    "96",
    needed_when="a model has buffers that its state dict leaves out, as a Mixtral's rotary embedding has",
)
def moe_saves_what_a_state_dict_holds(
    upstream: Callable, model: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple]:
    """MoECheckpointIO writes no buffers that are left out of state dicts.

    Without it a Mixtral's checkpoint holds "model.rotary_emb.inv_freq", and LowLevelZeroPlugin and others do not load
    it: Unexpected key(s).
    """
    from colossalai.utils import get_non_persistent_buffers_set

    # its own set is without those of the modules inside
    with temporarily(model, _non_persistent_buffers_set=get_non_persistent_buffers_set(model)):
        yield from upstream(model, *args, **kwargs)

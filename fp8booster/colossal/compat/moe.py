"""Mends of Colossal-AI's MoeHybridParallelPlugin."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch

_MOE_PLUGIN = "colossalai.booster.plugin.moe_hybrid_parallel_plugin"


@mend(
    module=_MOE_PLUGIN, place="booster/plugin/moe_hybrid_parallel_plugin.py:457", needed_when="overlap_allgather is on"
)
def moe_waits_for_gathered_weights(module: ModuleType, patch: Patch) -> None:
    """MoeHybridParallelPlugin's modules wait for the weights that ZeRO still gathers when they run.

    Without it the plugin passes overlap_allgather to the optimizer and not to the model's wrapper, so that nothing
    waits, and a forward may read weights of the step before. No longer needed when its modules wait for a parameter's
    gather handle.
    """
    from colossalai.zero.low_level.zero_hook import wait_all_gather_handle

    upstream = module.MoeHybridParallelPlugin.configure

    def wait(layer: nn.Module, _: tuple) -> None:
        for parameter in layer.parameters(recurse=False):
            wait_all_gather_handle(parameter)

    @functools.wraps(upstream)
    def configure(self, model: nn.Module, *others: Any, **named: Any) -> tuple:
        boosted = upstream(self, model, *others, **named)
        if self.zero_stage > 0 and self.zero_config["overlap_allgather"]:
            for layer in boosted[0].modules():
                if any(True for _ in layer.parameters(recurse=False)):
                    layer.register_forward_pre_hook(wait)
        return boosted

    patch.set(module.MoeHybridParallelPlugin, "configure", configure)


@mend(
    module=_MOE_PLUGIN,
    place="booster/plugin/moe_hybrid_parallel_plugin.py:438; booster/plugin/hybrid_parallel_plugin.py:173",
    needed_when="ep_size > 1 with zero_stage=0",
)
def moe_spreads_experts_with_zero_alone(module: ModuleType, patch: Patch) -> None:
    """Training without ZeRO is refused for experts that are spread over ranks, since their gradients would be mixed.

    Without it the ranks of pipelines average the gradients of different experts, each of which its rank alone holds;
    without a pipeline NameError: name 'dp_group' is not defined. No longer needed when with ep_size=2, pp_size=2 and
    zero_stage=0 the gradients of experts are averaged over `moe_dp_group`, and norms count every rank's experts.
    """
    upstream = module.MoeHybridParallelPlugin.configure

    @functools.wraps(upstream)
    def configure(self, model: nn.Module, optimizer: Any = None, *others: Any, **named: Any) -> tuple:
        trains = optimizer is not None or self.pp_size == 1  # without a pipeline it fails in any case
        if self.ep_size > 1 and self.zero_stage == 0 and trains:
            raise ValueError(
                f"experts are spread over {self.ep_size} ranks, and without ZeRO colossalai would average their "
                "gradients with those of other experts; use zero_stage=1"
            )
        return upstream(self, model, optimizer, *others, **named)

    patch.set(module.MoeHybridParallelPlugin, "configure", configure)


_MOE_CHECKPOINTS = "colossalai.checkpoint_io.moe_checkpoint"


@mend(module=_MOE_CHECKPOINTS, place="checkpoint_io/moe_checkpoint.py:284", needed_when="no CUDA or NPU device")
def moe_states_are_gathered_on_cpu(module: ModuleType, patch: Patch) -> None:
    """MoECheckpointIO gathers optimizer states where they lie if there is no GPU to move them to.

    Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver). No longer
    needed when `booster.save_optimizer(optimizer, path, shard=True)` returns on a machine without a GPU.
    """
    from colossalai.accelerator import get_accelerator

    if get_accelerator().name != "cpu":
        return
    upstream = module.MoECheckpointIO.gather_from_sharded_optimizer_state

    @functools.wraps(upstream)
    def gather(*args: Any, **named: Any) -> Any:
        move = torch.Tensor.cuda
        torch.Tensor.cuda = lambda tensor, *_, **__: tensor
        try:
            return upstream(*args, **named)
        finally:
            torch.Tensor.cuda = move

    patch.set(module.MoECheckpointIO, upstream.__name__, staticmethod(gather))


@mend(
    module=_MOE_CHECKPOINTS,
    place="checkpoint_io/moe_checkpoint.py:680,719,741",
    needed_when="experts are spread over ranks, and a checkpoint is to be one file",
)
def moe_saves_spread_experts_in_shards(module: ModuleType, patch: Patch) -> None:
    """Saving a model whose experts are spread over ranks to one file is refused, since the file would be wrong.

    Without it the first rank's experts are written with those of other ranks behind them in the same tensor, and the
    others' are missing. No longer needed when `booster.save_model(model, path)` with ep_size=2 writes every expert.
    """
    for name in ("save_unsharded_model", "save_unsharded_optimizer"):
        patch.set(module.MoECheckpointIO, name, _refusing(getattr(module.MoECheckpointIO, name)))


def _refusing(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def checked(self, *args: Any, **named: Any) -> None:
        if self.ep_size > 1:
            raise ValueError(
                f"experts are spread over {self.ep_size} ranks, and colossalai cannot write them to one file; "
                "save with shard=True"
            )
        save(self, *args, **named)

    return checked


@mend(
    module=_MOE_CHECKPOINTS,
    place="checkpoint_io/moe_checkpoint.py:116,686",
    needed_when="overlap_allgather is on, or weights travel in FP8",
)
def moe_waits_before_saving(module: ModuleType, patch: Patch) -> None:
    """MoECheckpointIO makes the model's weights ready before it reads them, as the other plugins' checkpoints do.

    Without it weights that ZeRO still gathers are saved as they are by then. No longer needed when
    `save_sharded_model` calls `model._force_wait_all_gather`.
    """
    for name in ("save_sharded_model", "save_unsharded_model"):
        patch.set(module.MoECheckpointIO, name, _waiting(getattr(module.MoECheckpointIO, name)))


def _waiting(save: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(save)
    def ready(self, model: nn.Module, *args: Any, **named: Any) -> None:
        model._force_wait_all_gather()
        save(self, model, *args, **named)

    return ready


@mend(
    module=_MOE_CHECKPOINTS,
    place="checkpoint_io/moe_checkpoint.py:96",
    needed_when="a model has buffers that its state dict leaves out, as a Mixtral's rotary embedding has",
)
def moe_saves_what_a_state_dict_holds(module: ModuleType, patch: Patch) -> None:
    """MoECheckpointIO writes no buffers that are left out of state dicts.

    Without it a Mixtral's checkpoint holds "model.rotary_emb.inv_freq", and LowLevelZeroPlugin and others do not load
    it: Unexpected key(s). No longer needed when the checkpoint's keys are those of the model's state dict.
    """
    from colossalai.utils import get_non_persistent_buffers_set

    upstream = module.MoECheckpointIO._model_sharder

    @functools.wraps(upstream)
    def shards(model: nn.Module, *args: Any, **named: Any) -> Iterator[tuple]:
        own = model._non_persistent_buffers_set  # without those of the modules inside
        model._non_persistent_buffers_set = get_non_persistent_buffers_set(model)
        try:
            yield from upstream(model, *args, **named)
        finally:
            model._non_persistent_buffers_set = own

    patch.set(module.MoECheckpointIO, "_model_sharder", staticmethod(shards))


@mend(
    module="colossalai.shardformer.policies.mixtral",
    place="shardformer/modeling/mixtral.py:675,783",
    needed_when="a Mixtral with enable_sequence_parallelism",
)
def mixtral_along_a_sequence_is_refused(module: ModuleType, patch: Patch) -> None:
    """Sequence parallelism is refused for Mixtral when the model is boosted.

    Without it every forward raises AttributeError: 'MixtralModel' object has no attribute '_attn_implementation', and
    behind that heads and tokens change places on the way to attention. No longer needed when a Mixtral with
    `sequence_parallelism_mode="all_to_all"` gives the loss of one process.
    """
    upstream = module.MixtralPolicy.module_policy

    @functools.wraps(upstream)
    def module_policy(self) -> dict:
        if self.shard_config.enable_sequence_parallelism:
            raise ValueError(
                "colossalai's sequence parallelism does not run a Mixtral; leave enable_sequence_parallelism out, and "
                "use tensor, pipeline or expert parallelism"
            )
        return upstream(self)

    patch.set(module.MixtralPolicy, "module_policy", module_policy)

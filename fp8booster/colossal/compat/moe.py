"""Mends of Colossal-AI's MoeHybridParallelPlugin."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

from torch import nn

from fp8booster.colossal.compat.registry import Patch, mend

_MOE_PLUGIN = "colossalai.booster.plugin.moe_hybrid_parallel_plugin"


@mend(
    module=_MOE_PLUGIN,
    place="booster/plugin/moe_hybrid_parallel_plugin.py:457",
    needed_when="overlap_allgather is on",
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

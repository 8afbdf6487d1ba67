"""`MoeHybridParallelPlugin` (expert parallelism within tensor, sequence, pipeline and data parallelism) with FP8."""

from __future__ import annotations

from functools import partial
from typing import Any

from colossalai.booster import plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule

from fp8booster.colossal.hybrid.optimizer import FP8MoeHybridParallelZeroOptimizer
from fp8booster.colossal.moe import convert_blocks
from fp8booster.colossal.unwrapped import module_of
from fp8booster.plugins.hybrid_parallel import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin, plugin.MoeHybridParallelPlugin):
    """Colossal-AI's MoeHybridParallelPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Routers stay in high precision.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` sends tokens to experts and back, and gradients and
    weights, in FP8.
    """

    native = plugin.MoeHybridParallelPlugin
    zero_optimizer = FP8MoeHybridParallelZeroOptimizer

    def convert_sharded(self, model: HybridParallelModule) -> None:
        """Turn the linear layers of a sharded model into FP8 layers, and its blocks into those that send FP8."""
        # layers first: blocks look for FP8 layers in their experts, to group them
        super().convert_sharded(model)
        network = module_of(model.unwrap())
        if self.ep_size > 1 and hasattr(network, "generate"):
            vars(network)["generate"] = partial(_generate_together, network)
        convert_blocks(model.unwrap(unwrap_peft=False), encoding=self.encoding if self.sends_fp8 else None)


def _generate_together(network: Any, *args: Any, **kwargs: Any) -> Any:
    """Generate on all ranks for as long as one of them does: each needs the experts of the others."""
    return type(network).generate(network, *args, **{"synced_gpus": True, **kwargs})

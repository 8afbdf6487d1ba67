"""`MoeHybridParallelPlugin` (expert parallelism within tensor, sequence, pipeline and data parallelism) with FP8."""

from __future__ import annotations

from typing import ClassVar

from colossalai.booster.plugin import MoeHybridParallelPlugin as NativeMoeHybridParallelPlugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelModule

from fp8booster.colossal.moe import take_over_blocks
from fp8booster.colossal.moe.optimizer import FP8MoeHybridParallelZeroOptimizer
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.plugins.hybrid_parallel import HybridParallelPlugin


class MoeHybridParallelPlugin(HybridParallelPlugin, NativeMoeHybridParallelPlugin):
    """Colossal-AI's MoeHybridParallelPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin.
    Routers stay in high precision.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8, the experts' among them, with
            precision "bf16" or "fp16".
        fp8_communication: send tokens to experts and back, and gradients and weights, in FP8; None does so with
            `use_fp8`, unless `fp8_config.communication` is off. Without `use_fp8` it is native's own.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: `use_fp8` with precision "fp32", or, when boosting, on a GPU without FP8 products or with a model
            that has no layer for it.
        TypeError: an argument that the native plugin does not have, or an `fp8_config` of another type.
        ImportError: a transformers whose models Colossal-AI cannot shard, without a `custom_policy`.
    """

    native: ClassVar[type[NativeMoeHybridParallelPlugin]] = NativeMoeHybridParallelPlugin
    zero_optimizer: ClassVar[type[FP8ZeroOptimizer]] = FP8MoeHybridParallelZeroOptimizer

    def convert(self, model: HybridParallelModule) -> None:
        """Turn the linear layers of a sharded model into FP8 layers, and its blocks into those that send FP8."""
        super().convert(model)
        take_over_blocks(model.unwrap(unwrap_peft=False), communication=self.sends_fp8)

"""Colossal-AI's plugins with FP8: change the import, add `use_fp8=True`."""

import fp8booster.colossal  # noqa: F401  # patches colossalai before it is imported
from fp8booster.plugins.gemini import GeminiPlugin
from fp8booster.plugins.hybrid_parallel import HybridParallelPlugin
from fp8booster.plugins.low_level_zero import LowLevelZeroPlugin
from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin
from fp8booster.plugins.torch_ddp import TorchDDPPlugin
from fp8booster.plugins.torch_fsdp import TorchFSDPPlugin

__all__ = [
    "GeminiPlugin",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "MoeHybridParallelPlugin",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

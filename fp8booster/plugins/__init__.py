"""Colossal-AI's plugins with FP8: change the import, add `use_fp8=True`."""

import fp8booster.colossal  # noqa: F401  # mends colossalai before it is imported
from fp8booster.plugins.low_level_zero import LowLevelZeroPlugin
from fp8booster.plugins.torch_ddp import TorchDDPPlugin

__all__ = ["LowLevelZeroPlugin", "TorchDDPPlugin"]

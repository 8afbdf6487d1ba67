"""`TorchDDPPlugin` (data parallel, every rank holds the whole model) with FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from colossalai.booster import plugin
from colossalai.interface import ModelWrapper, OptimizerWrapper

from fp8booster.comm import DDPState, ddp_hook
from fp8booster.comm.ddp import BUCKET_MB
from fp8booster.engine import DDP, Engine
from fp8booster.plugins.fp8_plugin import FP8Plugin


class TorchDDPPlugin(FP8Plugin, plugin.TorchDDPPlugin):
    """Colossal-AI's TorchDDPPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    What is not in FP8 is computed in the model's own precision, or in that of `Booster(mixed_precision=...)`.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` reduces gradients in FP8.
    """

    native = plugin.TorchDDPPlugin
    fp8_defaults: ClassVar = {"bucket_cap_mb": BUCKET_MB}

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        # FP8's hook has none, and PyTorch's reduction does
        return replace(DDP, sparse_gradients=not self.sends_fp8)

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Reduce gradients in FP8."""
        if self.sends_fp8:
            model.module.register_comm_hook(DDPState(encoding=self.encoding), ddp_hook)
        return f"gradients are sent {'in FP8' if self.sends_fp8 else 'uncompressed'}"

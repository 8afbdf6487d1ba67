"""`TorchFSDPPlugin` (PyTorch's FullyShardedDataParallel) with FP8."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from colossalai.accelerator import get_accelerator
from colossalai.booster import plugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer

from fp8booster.engine import FSDP, Engine
from fp8booster.nn.fsdp.handle import compress_flat_fsdp, why_not_gathered
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.plugins.fp8_plugin import FP8Plugin


class TorchFSDPPlugin(FP8Plugin, plugin.TorchFSDPPlugin):
    """Colossal-AI's TorchFSDPPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    What is not in FP8 is computed in the precision that `mixed_precision` asks for, or in the model's own. Give an
    `auto_wrap_policy`: without one the whole model is one unit, gathered at once.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` gathers the weights of these layers, and reduces
    gradients, in FP8.
    """

    native = plugin.TorchFSDPPlugin

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        # into other memory than FSDP2, which can keep it
        elsewhere = "FSDP gathers weights elsewhere at each step; use LowLevelZeroPlugin, or leave the option out"
        return replace(FSDP, cuda_graphs=elsewhere)

    def convert(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Convert, and leave all that does not train out of what FSDP shards, where weights are kept in FP8 alone.

        It flattens no bytes, and adapters are of another type than the frozen weights around them.
        """
        model, optimizer = super().convert(model, optimizer)
        if any(isinstance(module, FrozenLayer) for module in model.modules()):
            arguments: dict[str, Any] = vars(self)["fsdp_kwargs"]
            frozen = [module for module in model.modules() if _does_not_train(module)]
            arguments["ignored_modules"] = [*(arguments["ignored_modules"] or ()), *frozen]
            # FSDP moves only what it shards, and ignored modules would stay on the host
            model.to(get_accelerator().get_current_device())
        return model, optimizer

    def part_of(self, model: ModelWrapper, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        """The rank's among those that its unit is spread over."""
        for unit in FullyShardedDataParallel.fsdp_modules(model.module):
            if unit._handle is not None and tensor is unit._handle.flat_param:
                return unit._handle.rank if unit._handle.uses_sharded_strategy else 0
        return 0

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Gather the weights of FP8 layers, and reduce gradients, in FP8."""
        encoding = self.encoding
        compress_flat_fsdp(model, gather=self.sends_fp8, reduce=self.sends_fp8, encoding=encoding)
        frozen = any(isinstance(module, FrozenLayer) for module in model.modules())
        whole = "; frozen weights are whole on each rank" if frozen else ""
        if not self.sends_fp8:
            return f"gradients and weights are sent uncompressed{whole}"
        reason = why_not_gathered()
        weights = "and FP8 layers' weights" if reason is None else f"weights uncompressed ({reason})"
        return f"gradients are sent in FP8, {weights}{whole}"

    def support_no_sync(self) -> bool:
        """With `use_fp8`; Colossal-AI's plugin has no `no_sync`."""
        return self.use_fp8

    def no_sync(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> AbstractContextManager:
        """Gradients of backwards in it are added up whole on each rank, and reduced with the next one outside it."""
        return model.module.no_sync() if self.use_fp8 else super().no_sync(model, optimizer)


def _does_not_train(module: nn.Module) -> bool:
    """Tell whether a module holds parameters, itself and no other, of which none trains."""
    own = list(module.parameters())
    return bool(own) and next(module.children(), None) is None and not any(each.requires_grad for each in own)

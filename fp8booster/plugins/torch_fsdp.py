"""`TorchFSDPPlugin` (PyTorch's FullyShardedDataParallel) with FP8."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import TorchFSDPPlugin as NativeTorchFSDPPlugin
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.comm import Encoding
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fsdp.handle import compress_flat_fsdp, why_not_gathered
from fp8booster.nn.fused import fuse, fused_summary
from fp8booster.plugins.arguments import bind, require_config, warn_of_no_effect

WHY_WEIGHTS_STAY = "FSDP frees by itself what it gathers; leave the option out"
"""Why `FP8Config.weights_in_16_bits=False` changes nothing."""


class TorchFSDPPlugin(NativeTorchFSDPPlugin):
    """Colossal-AI's TorchFSDPPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin. What
    is not in FP8 is computed in the precision that `mixed_precision` asks for, or in the model's own. Give an
    `auto_wrap_policy`: without one the whole model is one unit, gathered at once.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8.
        fp8_communication: gather the weights of these layers, and reduce gradients, in FP8. None does so with
            `use_fp8`, unless `fp8_config.communication` is off. Without `use_fp8` it is native's own.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: when boosting with `use_fp8`, on a GPU without FP8 products or with a model that has no layer for
            it.
        TypeError: an argument that the native plugin does not have, or an `fp8_config` of another type.
    """

    def __init__(self, *args: Any, use_fp8: bool = False, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = bind(NativeTorchFSDPPlugin, args, kwargs)
        self.use_fp8 = use_fp8
        self.fp8_config = require_config(fp8_config)
        communication = arguments.pop("fp8_communication", None)
        if communication is None:
            communication = use_fp8 and self.fp8_config.communication
        self.sends_fp8 = use_fp8 and communication
        """Parameters and gradients travel in FP8 by `compress_flat_fsdp`; `fp8_communication` says whether by native's
        hooks."""
        super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        warn_of_no_effect(self.logger, fp8_config, use_fp8, self.sends_fp8, WHY_WEIGHTS_STAY)
        if self.sends_fp8 and self.fp8_config.gradient_scaling == "auto":
            self.logger.warning(
                'fp8_config.gradient_scaling="auto" has no effect: FSDP\'s gradients are scaled by block', ranks=[0]
            )

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap model and optimizer for FSDP, after turning the model's linear layers into FP8 layers in place."""
        if self.use_fp8:
            require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate)
            convert_to_fp8(model, self.fp8_config)
            if self.fp8_config.fused:
                fuse(model)
        boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        if self.use_fp8:
            in_one = self.fp8_config.gradient_scaling == "tensor"
            compress_flat_fsdp(
                boosted[0],
                gather=self.sends_fp8,
                reduce=self.sends_fp8,
                encoding=Encoding(block_size=None) if in_one else Encoding(),
            )
            fused = f"; {fused_summary(boosted[0])}" if self.fp8_config.fused else ""
            self.logger.info(f"{report(boosted[0]).summary()}{fused}; {self._wire()}", ranks=[0])
        return boosted

    def _wire(self) -> str:
        """What travels in FP8, for the summary line."""
        if not self.sends_fp8:
            return "gradients and weights travel uncompressed"
        reason = why_not_gathered()
        weights = "and FP8 layers' weights" if reason is None else f"weights uncompressed ({reason})"
        return f"gradients travel in FP8, {weights}"

    def support_no_sync(self) -> bool:
        """With `use_fp8`; the native plugin has no `no_sync`."""
        return self.use_fp8

    def no_sync(self, model: nn.Module, optimizer: OptimizerWrapper) -> AbstractContextManager:
        """Gradients of backwards in it are added up whole on each rank, and reduced with the next one outside it."""
        if not self.use_fp8:
            return super().no_sync(model, optimizer)
        return model.module.no_sync()

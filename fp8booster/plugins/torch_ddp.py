"""`TorchDDPPlugin` (data parallel, every rank holds the whole model) with FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import TorchDDPPlugin as NativeTorchDDPPlugin
from colossalai.interface import OptimizerWrapper
from colossalai.logging import get_dist_logger
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.comm import DDPState, ddp_hook
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse
from fp8booster.plugins.arguments import bind, require_config, warn_of_no_effect

FP8_BUCKET_CAP_MB = 64
"""Default of `bucket_cap_mb` where gradients travel in FP8, against native's 25: inside a node, messages under 64 MiB
are faster uncompressed (`comm.threshold`), and DDP closes a bucket with the gradient that fills it."""

WHY_WEIGHTS_STAY = "DDP sends no weights, and trains those of the model; use LowLevelZeroPlugin, or leave it out"
"""Why `FP8Config.weights_in_16_bits=False` changes nothing."""


class TorchDDPPlugin(NativeTorchDDPPlugin):
    """Colossal-AI's TorchDDPPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin. What
    is not in FP8 is computed in the model's own precision, or in that of `Booster(mixed_precision=...)`.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8.
        fp8_communication: reduce gradients in FP8. None does so with `use_fp8`, unless `fp8_config.communication` is
            off. Without `use_fp8` it is native's own.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: when boosting with `use_fp8`, on a GPU without FP8 products or with a model that has no layer for
            it.
        TypeError: an argument that the native plugin does not have, or an `fp8_config` of another type.
    """

    def __init__(self, *args: Any, use_fp8: bool = False, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = bind(NativeTorchDDPPlugin, args, kwargs)
        self.use_fp8 = use_fp8
        self.fp8_config = require_config(fp8_config)
        self.logger = get_dist_logger()
        communication = arguments.pop("fp8_communication", None)
        if communication is None:
            communication = use_fp8 and self.fp8_config.communication
        self.reduces_in_fp8 = use_fp8 and communication
        """Gradients are reduced by `comm.ddp_hook`; `fp8_communication` says whether by native's hook."""
        if self.reduces_in_fp8:
            arguments.setdefault("bucket_cap_mb", FP8_BUCKET_CAP_MB)
        super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        warn_of_no_effect(self.logger, fp8_config, use_fp8, self.reduces_in_fp8, WHY_WEIGHTS_STAY)
        if self.reduces_in_fp8 and self.fp8_config.gradient_scaling != "block":
            self.logger.warning(
                "fp8_config.gradient_scaling has no effect: DDP's gradients are scaled by block", ranks=[0]
            )

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap model and optimizer for DDP, after turning the model's linear layers into FP8 layers in place."""
        if self.use_fp8:
            require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate)
            convert_to_fp8(model, self.fp8_config)
            fused = f"; {fuse(model)}" if self.fp8_config.fused else ""
        boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        if self.reduces_in_fp8:
            boosted[0].module.register_comm_hook(DDPState(), ddp_hook)
        if self.use_fp8:
            wire = "in FP8" if self.reduces_in_fp8 else "uncompressed"
            self.logger.info(f"{report(boosted[0]).summary()}{fused}; gradients travel {wire}", ranks=[0])
        return boosted

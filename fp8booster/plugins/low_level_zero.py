"""`LowLevelZeroPlugin` (ZeRO stages 1 and 2) with FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import LowLevelZeroPlugin as NativeLowLevelZeroPlugin
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.colossal.zero.gradient_order import keep_one_order
from fp8booster.colossal.zero.late_weights import wait_before_forward
from fp8booster.colossal.zero.lone_save import saved_by_every_rank
from fp8booster.colossal.zero.model import FP8ZeroModel
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import convert_to_fp8, report
from fp8booster.nn.fused import fuse
from fp8booster.plugins.arguments import (
    bind,
    require_16_bits,
    require_config,
    warn_of_no_effect,
    why_zero_gathers_16_bits,
)

FP8_BUCKET_SIZE_IN_M = 64
"""Default of `reduce_bucket_size_in_m` where gradients travel in FP8, against native's 12: inside a node, messages
under 64 MiB are faster uncompressed (`comm.threshold`), and a bucket is sent before it would be overfilled."""


class LowLevelZeroPlugin(NativeLowLevelZeroPlugin):
    """Colossal-AI's LowLevelZeroPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8, with precision "bf16" or
            "fp16".
        fp8_communication: send gradients and weights in FP8; None does so with `use_fp8`, unless
            `fp8_config.communication` is off.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: `use_fp8` with precision "fp32", or, when boosting, on a GPU without FP8 products or with a model
            that has no layer for it.
        TypeError: an argument that the native plugin does not have, or an `fp8_config` of another type.
    """

    def __init__(self, *args: Any, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = bind(NativeLowLevelZeroPlugin, args, kwargs)
        use_fp8 = arguments.pop("use_fp8", False)
        fp8_communication = arguments.pop("fp8_communication", None)
        self.fp8_config = require_config(fp8_config)
        if use_fp8:
            require_16_bits(arguments.get("precision", "fp16"))
        if fp8_communication is None:
            fp8_communication = use_fp8 and self.fp8_config.communication
        self.fp8_communication = fp8_communication
        if use_fp8 and fp8_communication:
            arguments.setdefault("reduce_bucket_size_in_m", FP8_BUCKET_SIZE_IN_M)
        # with use_fp8 off all is native's; with it on, native's own FP8 stays off, since ours takes its place
        super().__init__(**arguments, fp8_communication=fp8_communication and not use_fp8)
        self.use_fp8 = use_fp8
        needs = {
            "master_weights=True": arguments.get("master_weights", True),
            "extra_dp_size=1": arguments.get("extra_dp_size", 1) == 1,
        }
        weights = why_zero_gathers_16_bits(self.fp8_config, fp8_communication, needs)
        warn_of_no_effect(self.logger, fp8_config, use_fp8, fp8_communication, weights)

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Wrap model and optimizer for ZeRO, after turning the model's linear layers into FP8 layers in place."""
        if not self.use_fp8:
            return super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate)
        convert_to_fp8(model, self.fp8_config)
        fused = f"; {fuse(model)}" if self.fp8_config.fused else ""
        self.use_fp8 = False  # native would hook F.linear with its own FP8 product
        try:
            boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        finally:
            self.use_fp8 = True
        boosted_model, boosted_optimizer, *_ = boosted
        if self.zero_optim_kwargs["overlap_allgather"]:
            wait_before_forward(boosted_model.module)
        if self.fp8_communication and boosted_optimizer is not None:
            FP8ZeroOptimizer.convert_in_place(boosted_optimizer, boosted_model.module, self.fp8_config.gradient_scaling)
            FP8ZeroModel.convert_in_place(boosted_model, boosted_optimizer)
        if boosted_optimizer is not None:
            keep_one_order(boosted_optimizer, boosted_model.module)
        self.logger.info(f"{report(boosted_model).summary()}{fused}; {self._wire(boosted_optimizer)}", ranks=[0])
        return boosted

    def get_checkpoint_io(self) -> CheckpointIO:
        """The native checkpoint IO, which notices a model that rank 0 saves alone where all ranks must."""
        return saved_by_every_rank(super().get_checkpoint_io())

    def _wire(self, optimizer: OptimizerWrapper | None) -> str:
        """What travels in FP8, for the summary line."""
        if not isinstance(optimizer, FP8ZeroOptimizer):
            return f"gradients and weights travel in {self.precision.upper()}"
        trained = sum(len(group) for group in optimizer._working_param_groups.values())
        return f"gradients travel in FP8, and {len(optimizer.gathered_weights)} of {trained} weights"

"""`HybridParallelPlugin` (tensor, sequence, pipeline and data parallel, with ZeRO or without) with FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster.plugin import HybridParallelPlugin as NativeHybridParallelPlugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer, HybridParallelModule
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import OptimizerWrapper
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fp8booster.colossal.hybrid.model import FP8HybridParallelModule
from fp8booster.colossal.hybrid.optimizer import FP8HybridParallelAMPOptimizer, FP8HybridParallelZeroOptimizer
from fp8booster.colossal.pipeline import compress_pipeline
from fp8booster.colossal.sharding import require_sharding
from fp8booster.colossal.tensor import compress_groups, convert_sharded_to_fp8, fuse_sharded
from fp8booster.colossal.zero.gradient_order import keep_one_order
from fp8booster.colossal.zero.late_weights import make_parameters_plain, wait_before_forward
from fp8booster.colossal.zero.lone_save import saved_by_every_rank
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.nn import report
from fp8booster.plugins.arguments import (
    bind,
    require_16_bits,
    require_config,
    warn_of_no_effect,
    why_zero_gathers_16_bits,
)

FP8_BUCKETS = {"zero_bucket_size_in_m": 64, "ddp_bucket_cap_mb": 64}
"""Defaults where gradients travel in FP8, against native's 12 and 25: inside a node, messages under 64 MiB are faster
uncompressed (`comm.threshold`)."""


class HybridParallelPlugin(NativeHybridParallelPlugin):
    """Colossal-AI's HybridParallelPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Takes every argument of the native plugin with the native default. Without `use_fp8` it is the native plugin.

    Args:
        use_fp8: run fprop, dgrad and wgrad of the layers that `fp8_config` names in FP8, sharded or not, with precision
            "bf16" or "fp16".
        fp8_communication: send activations, gradients and weights in FP8; None does so with `use_fp8`, unless
            `fp8_config.communication` is off. Without `use_fp8` it is native's own.
        fp8_config: which layers, which formats; None is `FP8Config()`.

    Raises:
        ValueError: `use_fp8` with precision "fp32", or, when boosting, on a GPU without FP8 products or with a model
            that has no layer for it.
        TypeError: an argument that the native plugin does not have, or an `fp8_config` of another type.
        ImportError: a transformers whose models Colossal-AI cannot shard, without a `custom_policy`.
    """

    native: ClassVar[type[NativeHybridParallelPlugin]] = NativeHybridParallelPlugin
    """Whose arguments this plugin takes."""

    zero_optimizer: ClassVar[type[FP8ZeroOptimizer]] = FP8HybridParallelZeroOptimizer
    """What ZeRO's optimizer becomes where gradients and weights travel in FP8."""

    def __init__(self, *args: Any, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        arguments = bind(self.native, args, kwargs)
        if arguments.get("custom_policy") is None:
            require_sharding(type(self).__name__)
        use_fp8 = arguments.pop("use_fp8", False)
        communication = arguments.pop("fp8_communication", None)
        self.fp8_config = require_config(fp8_config)
        if use_fp8:
            require_16_bits(arguments.get("precision", "fp16"))
        if communication is None:
            communication = use_fp8 and self.fp8_config.communication
        if use_fp8 and communication:
            arguments = FP8_BUCKETS | arguments
        # with use_fp8 off all is native's; with it on, native's own FP8 stays off, since ours takes its place
        super().__init__(**arguments, fp8_communication=communication and not use_fp8)
        self.use_fp8 = use_fp8
        self.sends_fp8 = bool(use_fp8 and communication)
        """Activations, gradients and weights travel in FP8, by the functions of `fp8booster.comm`."""
        if self.sends_fp8:
            self.compress_activations()
        zero = {"zero_stage=1 or 2": self.zero_stage > 0}
        weights = why_zero_gathers_16_bits(self.fp8_config, self.sends_fp8, zero)
        warn_of_no_effect(self.logger, fp8_config, use_fp8, self.sends_fp8, weights)

    def __del__(self) -> None:
        if "pg_mesh" in self.__dict__:  # refused arguments leave a plugin without groups
            super().__del__()

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: LRScheduler | None = None,
    ) -> tuple[nn.Module, OptimizerWrapper, Callable, DataLoader, LRScheduler]:
        """Shard and wrap model and optimizer as native does, then turn the model's linear layers into FP8 layers."""
        if not self.use_fp8:
            return super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        require_fp8(get_accelerator().get_current_device(), self.fp8_config.emulate)
        self.use_fp8 = False  # native would hook F.linear with its own FP8 product
        try:
            boosted = super().configure(model, optimizer, criterion, dataloader, lr_scheduler)
        finally:
            self.use_fp8 = True
        boosted_model, boosted_optimizer, *_ = boosted
        self.convert(boosted_model)
        late = self.zero_stage > 0 and self.zero_config["overlap_allgather"]
        fused = ""
        if self.fp8_config.fused:
            if late:
                make_parameters_plain(boosted_model.module)
            fused = f"; {fuse_sharded(boosted_model.unwrap(unwrap_peft=False), self.shard_config)}"
        if late:
            wait_before_forward(boosted_model.module)
        if self.sends_fp8:
            self.compress_gradients(boosted_model, boosted_optimizer)
        if isinstance(boosted_optimizer, LowLevelZeroOptimizer):
            keep_one_order(boosted_optimizer, boosted_model.unwrap(unwrap_peft=False))
        self.logger.info(f"{report(boosted_model).summary()}{fused}; {self.wire(boosted_optimizer)}", ranks=[0])
        return boosted

    def get_checkpoint_io(self) -> CheckpointIO:
        """The native checkpoint IO, which notices a model that rank 0 saves alone where all ranks must."""
        return saved_by_every_rank(super().get_checkpoint_io())

    def compress_activations(self) -> None:
        """Send in FP8 what tensor and sequence parallel ranks and pipeline stages exchange."""
        self.shard_config.fp8_communication = True  # shardformer calls native's FP8 collectives then
        compress_groups(self.tp_group, self.sp_group)  # and these groups go by ours
        compress_pipeline(self)

    def convert(self, model: HybridParallelModule) -> None:
        """Turn the linear layers of a sharded model into FP8 layers, in place.

        Raises:
            ValueError: no layer on any pipeline stage is left to compute in FP8.
        """
        reason = None
        try:
            convert_sharded_to_fp8(model.unwrap(unwrap_peft=False), self.fp8_config, communication=self.sends_fp8)
        except ValueError as error:
            reason = error
        if self.pp_size > 1:
            converted = torch.tensor(reason is None, dtype=torch.int32, device=get_accelerator().get_current_device())
            dist.all_reduce(converted, dist.ReduceOp.MAX, self.pp_group)
            if converted.item():
                return
        if reason is not None:
            raise reason

    def compress_gradients(self, model: HybridParallelModule, optimizer: OptimizerWrapper | None) -> None:
        """Reduce gradients, and with ZeRO gather weights, in FP8."""
        if isinstance(optimizer, LowLevelZeroOptimizer):
            self.zero_optimizer.convert_in_place(
                optimizer, model.unwrap(unwrap_peft=False), self.fp8_config.gradient_scaling
            )
        elif self.fp8_config.gradient_scaling != "block":
            self.logger.warning(
                "fp8_config.gradient_scaling has no effect: without ZeRO, gradients are scaled by block", ranks=[0]
            )
        FP8HybridParallelModule.convert_in_place(model, optimizer)
        if isinstance(optimizer, HybridParallelAMPOptimizer):
            FP8HybridParallelAMPOptimizer.convert_in_place(optimizer)

    def wire(self, optimizer: OptimizerWrapper | None) -> str:
        """What travels in FP8, for the summary line."""
        if not self.sends_fp8:
            return f"activations, gradients and weights travel in {self.precision.upper()}"
        if not isinstance(optimizer, FP8ZeroOptimizer):
            return "activations and gradients travel in FP8"
        trained = sum(len(group) for group in optimizer._working_param_groups.values())
        return f"activations and gradients travel in FP8, and {len(optimizer.gathered_weights)} of {trained} weights"

"""`HybridParallelPlugin` (tensor, sequence, pipeline and data parallel, with ZeRO or without) with FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import plugin
from colossalai.booster.plugin.hybrid_parallel_plugin import HybridParallelAMPOptimizer, HybridParallelModule
from colossalai.interface import OptimizerWrapper
from colossalai.zero.low_level import LowLevelZeroOptimizer
from torch import nn
from torch.optim import Optimizer

from fp8booster.colossal.hybrid.model import FP8HybridParallelModule
from fp8booster.colossal.hybrid.optimizer import FP8HybridParallelAMPOptimizer, FP8HybridParallelZeroOptimizer
from fp8booster.colossal.pipeline import compress_pipeline
from fp8booster.colossal.sharding import require_sharding
from fp8booster.colossal.tensor import compress_groups, convert_sharded_to_fp8, fuse_sharded
from fp8booster.colossal.unwrapped import module_of
from fp8booster.colossal.zero.gradient_order import keep_one_order
from fp8booster.colossal.zero.late_weights import make_parameters_plain, wait_before_forward
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer, zero_part_of
from fp8booster.comm.ddp import BUCKET_MB
from fp8booster.config import FP8Config
from fp8booster.engine import Engine
from fp8booster.nn.saves import refuse_saves
from fp8booster.plugins.fp8_plugin import FP8Plugin, zero_engine


class HybridParallelPlugin(FP8Plugin, plugin.HybridParallelPlugin):
    """Colossal-AI's HybridParallelPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` sends activations, gradients and weights in FP8.

    Raises:
        ImportError: a transformers whose models Colossal-AI cannot shard, without a `custom_policy`.
    """

    native = plugin.HybridParallelPlugin
    # against 12 and 25: inside a node, messages under 64 MiB are faster uncompressed (`comm.threshold`)
    fp8_defaults: ClassVar = {"zero_bucket_size_in_m": 64, "ddp_bucket_cap_mb": BUCKET_MB}

    zero_optimizer: ClassVar[type[FP8ZeroOptimizer]] = FP8HybridParallelZeroOptimizer
    """The class of ZeRO's optimizer where gradients and weights are sent in FP8."""

    def __init__(self, *args: Any, fp8_config: FP8Config | None = None, **kwargs: Any) -> None:
        super().__init__(*args, fp8_config=fp8_config, **kwargs)
        if self.sends_fp8:
            self.shard_config.fp8_communication = True  # shardformer calls Colossal-AI's FP8 collectives then
            compress_groups(self.tp_group, self.sp_group, encoding=self.encoding)  # and these groups go by ours
            compress_pipeline(self, self.encoding)

    def require_support(self, arguments: Mapping[str, Any]) -> None:
        # a policy of the user's own shards whatever it was written for
        if arguments.get("custom_policy") is None:
            require_sharding(type(self).__name__)

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        with_zero = self.zero_stage > 0
        mode = self.shard_config.sequence_parallelism_mode if self.enable_sequence_parallelism else None
        graphs = accumulation = scaling = None
        if mode not in (None, "split_gather", "all_to_all"):
            graphs = (
                f'sequence_parallelism_mode="{mode}" sends piece by piece; use "split_gather", or leave the option out'
            )
        if not with_zero:
            accumulation = "gradients add up whole without ZeRO; give zero_stage=1 or 2, or leave the option out"
            scaling = "without ZeRO, gradients are scaled by block; give zero_stage=1 or 2, or leave the option out"
        elif self.pp_size > 1:  # its schedule reduces once for all micro-batches
            accumulation = "a pipeline adds the gradients of its micro-batches up whole; leave the option out"
        return zero_engine(
            self,
            {"zero_stage=1 or 2": with_zero},
            gradient_accumulation=accumulation,
            automatic_scaling=scaling,
            cuda_graphs=graphs,
            in_buffers=with_zero,
        )

    def convert(self, model: nn.Module, optimizer: Optimizer | None) -> tuple[nn.Module, Optimizer | None]:
        """Return both as they are: layers are converted when Colossal-AI has sharded them."""
        return model, optimizer

    def part_of(self, model: HybridParallelModule, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        # the same on each rank of tensor parallelism, of which some hold copies
        return zero_part_of(optimizer, tensor) if isinstance(optimizer, LowLevelZeroOptimizer) else 0

    def extend(self, model: HybridParallelModule, optimizer: OptimizerWrapper | None) -> str:
        """Convert and fuse the sharded layers; reduce gradients, and with ZeRO gather weights, in FP8."""
        # before fusing, which asks each layer whether and how it multiplies in FP8
        self.convert_sharded(model)
        sizes = {name: getattr(self, name, 1) for name in ("tp_size", "pp_size", "ep_size")}
        if parted := ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1):
            refuse_saves(
                module_of(model.unwrap()),
                f"each rank holds a part of the model ({parted}), which save_pretrained would write for the whole; "
                "call booster.save_model(model, folder, shard=True) on every rank, or give a whole state_dict",
            )
        unwrapped, with_zero = model.unwrap(unwrap_peft=False), isinstance(optimizer, LowLevelZeroOptimizer)
        late = self.zero_stage > 0 and self.zero_config["overlap_allgather"]
        if self.fp8_config.fused:
            if late:
                make_parameters_plain(model.module)
            fuse_sharded(unwrapped, self.shard_config)
        if late:
            wait_before_forward(model.module)
        if self.sends_fp8:
            if with_zero:
                config = self.fp8_config
                # the plugin has said that the option has no effect, and the optimizer must not act by it
                if self.engine.gradient_accumulation is not None:
                    config = replace(config, gradient_accumulation="32-bit")
                self.zero_optimizer.convert_in_place(optimizer, unwrapped, config)
            FP8HybridParallelModule.convert_in_place(model, optimizer, self.encoding)
            if isinstance(optimizer, HybridParallelAMPOptimizer):
                FP8HybridParallelAMPOptimizer.convert_in_place(optimizer)
        if with_zero:
            # last: it goes before whatever class the optimizer has by now
            keep_one_order(optimizer, unwrapped)
        if not self.sends_fp8:
            return f"activations, gradients and weights are sent in {self.precision.upper()}"
        if not isinstance(optimizer, FP8ZeroOptimizer):
            return "activations and gradients are sent in FP8"
        return "activations and gradients are sent in FP8, and {} of {} weights".format(*optimizer.count_weights())

    def convert_sharded(self, model: HybridParallelModule) -> None:
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
            # a stage may hold no layer for FP8, as the last one with the head alone; some stage must
            converted = torch.tensor(reason is None, dtype=torch.int32, device=get_accelerator().get_current_device())
            dist.all_reduce(converted, dist.ReduceOp.MAX, self.pp_group)
            if converted.item():
                return
        if reason is not None:
            raise reason

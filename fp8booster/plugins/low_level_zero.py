"""`LowLevelZeroPlugin` (ZeRO stages 1 and 2) with FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from colossalai.booster import plugin
from colossalai.interface import ModelWrapper, OptimizerWrapper

from fp8booster.colossal.zero.gradient_order import keep_one_order
from fp8booster.colossal.zero.late_weights import wait_before_forward
from fp8booster.colossal.zero.model import FP8ZeroModel
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer, zero_part_of
from fp8booster.engine import Engine
from fp8booster.plugins.fp8_plugin import FP8Plugin, zero_engine


class LowLevelZeroPlugin(FP8Plugin, plugin.LowLevelZeroPlugin):
    """Colossal-AI's LowLevelZeroPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` sends gradients and weights in FP8.
    """

    native = plugin.LowLevelZeroPlugin
    # against 12: inside a node, messages under 64 MiB are faster uncompressed (`comm.threshold`), and a bucket is sent
    # before it would be overfilled
    fp8_defaults: ClassVar = {"reduce_bucket_size_in_m": 64}

    def find_engine(self, arguments: Mapping[str, Any]) -> Engine:
        needs = {
            "master_weights=True": arguments.get("master_weights", True),
            "extra_dp_size=1": arguments.get("extra_dp_size", 1) == 1,
        }
        update = None
        if not self.sends_fp8:
            update = (
                "Colossal-AI's ZeRO updates when all gradients are reduced; give use_fp8=True and fp8_communication"
            )
        elif self.zero_optim_kwargs["clip_grad_norm"] > 0:
            update = "the gradients' norm, by which they are clipped, is known after backward; give max_norm=0"
        elif self.precision == "fp16":
            update = 'whether an FP16 gradient overflowed is known after backward; give precision="bf16"'
        return zero_engine(self, needs, update_in_backward=update, in_buffers=True)

    def part_of(self, model: ModelWrapper, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        return zero_part_of(optimizer, tensor)

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Reduce gradients, and gather the weights of FP8 layers, in FP8."""
        # also without FP8 messages: the weights of FP8 layers are read past Colossal-AI's own hook
        if self.zero_optim_kwargs["overlap_allgather"]:
            wait_before_forward(model.module)
        if self.sends_fp8 and optimizer is not None:
            FP8ZeroOptimizer.convert_in_place(optimizer, model.module, self.fp8_config)
            FP8ZeroModel.convert_in_place(model, optimizer)
        if optimizer is not None:
            # also with messages in 16 bits: layers choose between FP8 and 16 bits by each rank's own number of tokens
            keep_one_order(optimizer, model.module)
        if not isinstance(optimizer, FP8ZeroOptimizer):
            return f"gradients and weights are sent in {self.precision.upper()}"
        return "gradients are sent in FP8, and {} of {} weights".format(*optimizer.count_weights())

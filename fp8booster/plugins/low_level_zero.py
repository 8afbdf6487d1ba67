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
from fp8booster.plugins.fp8_plugin import WITHOUT_FP8, FP8Plugin, why_zero_gathers_16_bits


class LowLevelZeroPlugin(FP8Plugin, plugin.LowLevelZeroPlugin):
    """Colossal-AI's LowLevelZeroPlugin, where `use_fp8=True` runs the products of linear layers in FP8.

    Arguments are those of `FP8Plugin`, of which `fp8_communication` sends gradients and weights in FP8.

    Raises:
        ValueError, TypeError: as in `FP8Plugin`.
    """

    native = plugin.LowLevelZeroPlugin
    # against 12: inside a node, messages under 64 MiB are faster uncompressed (`comm.threshold`), and a bucket is sent
    # before it would be overfilled
    fp8_defaults: ClassVar = {"reduce_bucket_size_in_m": 64}

    def trains_in_buffers(self) -> bool:
        return True

    def why_weights_in_16_bits(self, arguments: Mapping[str, Any]) -> str | None:
        """ZeRO needs masters, and one group of ranks, to gather in FP8."""
        needs = {
            "master_weights=True": arguments.get("master_weights", True),
            "extra_dp_size=1": arguments.get("extra_dp_size", 1) == 1,
        }
        return why_zero_gathers_16_bits(self, needs)

    def why_accumulates_by_itself(self) -> str | None:
        """The optimizer that sends FP8 accumulates."""
        return None if self.sends_fp8 else WITHOUT_FP8

    def why_no_update_in_backward(self) -> str | None:
        """Where ranks reduce in FP8 they may, but not by what is known of all gradients at their end alone."""
        if not self.sends_fp8:
            return "Colossal-AI's ZeRO updates when all gradients are reduced; give use_fp8=True and fp8_communication"
        if self.zero_optim_kwargs["clip_grad_norm"] > 0:
            return "the gradients' norm, by which they are clipped, is known after backward; give max_norm=0"
        if self.precision == "fp16":
            return 'whether an FP16 gradient overflowed is known after backward; give precision="bf16"'
        return None

    def part_of(self, model: ModelWrapper, optimizer: OptimizerWrapper, tensor: torch.Tensor) -> int:
        """ZeRO's part of it."""
        return zero_part_of(optimizer, tensor)

    def extend(self, model: ModelWrapper, optimizer: OptimizerWrapper | None) -> str:
        """Reduce gradients, and gather the weights of FP8 layers, in FP8."""
        if self.zero_optim_kwargs["overlap_allgather"]:
            wait_before_forward(model.module)
        if self.sends_fp8 and optimizer is not None:
            FP8ZeroOptimizer.convert_in_place(optimizer, model.module, self.fp8_config)
            FP8ZeroModel.convert_in_place(model, optimizer)
        if optimizer is not None:
            keep_one_order(optimizer, model.module)
        if not isinstance(optimizer, FP8ZeroOptimizer):
            return f"gradients and weights are sent in {self.precision.upper()}"
        return "gradients are sent in FP8, and {} of {} weights".format(*optimizer.count_weights())

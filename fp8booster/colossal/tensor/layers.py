"""Forward passes of FP8 layers that take the place of shardformer's: column parallel, row parallel and whole.

Options mean what they mean in Colossal-AI (shardformer/layer/linear.py, qkv_fused_linear.py). Where `fp8_product` gives
nothing, because the layer is too small for FP8 to pay, Colossal-AI's forward runs.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import _operation
from colossalai.shardformer.layer._operation import split_forward_gather_backward
from colossalai.shardformer.layer.utils import is_share_sp_tp

from fp8booster.colossal.pipeline import defer_weight_gradient
from fp8booster.nn import FP8Layer
from fp8booster.nn.linear.exchange import NO_EXCHANGE, Exchange
from fp8booster.nn.linear.functional import Defer
from fp8booster.nn.parallel.tensor_parallel import ColumnParallel, RowParallel, SequenceColumn, SequenceRow

LayerOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""The output, or with `skip_bias_add` output and bias."""


class ShardedLayer(FP8Layer):
    """What FP8 layers of shardformer share."""

    skip_bias_add: bool
    use_zbv: bool

    alone: ClassVar[type[Exchange] | None] = None
    along_sequence: ClassVar[type[Exchange] | None] = None

    def fp8_exchange(self) -> Exchange:
        """What the ranks of the layer's group exchange: in Colossal-AI with `seq_parallel_mode` and without."""
        if dist.get_world_size(self.process_group) == 1:
            return NO_EXCHANGE
        if is_share_sp_tp(self.seq_parallel_mode):
            dimension = getattr(self, "seq_parallel_dim", 1)
            return self.along_sequence(self.process_group, dimension, communication=self.fp8_communication)
        return self.alone(self.process_group, communication=self.fp8_communication)

    def fp8_defer(self) -> Defer | None:
        """Under the zero-bubble schedule, what its passes for weights work off."""
        return defer_weight_gradient(self.held_weight) if self.use_zbv else None


class WholeLayer(ShardedLayer):
    """A layer whose weight every rank holds whole."""

    def fp8_exchange(self) -> Exchange:
        """Nothing."""
        return NO_EXCHANGE

    def fp8_merges_by(self) -> Hashable | None:
        """Whether its gradient is computed later."""
        return None if self.skip_bias_add else (type(self), self.use_zbv)

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        """[..., in_features] to [..., out_features]."""
        output = self.fp8_product(input_, None if self.skip_bias_add else self.bias)
        if output is None:
            return super().forward(input_)
        return (output, self.bias) if self.skip_bias_add else output


class ColumnLayer(ShardedLayer):
    """A layer whose output features are spread over a group."""

    alone = ColumnParallel
    along_sequence = SequenceColumn

    def fp8_merges_by(self) -> Hashable | None:
        """Its ranks, and how and along what they exchange."""
        if self.skip_bias_add or self.gather_output:
            return None
        along = self.seq_parallel_mode, getattr(self, "seq_parallel_dim", 1)
        return type(self), self.process_group, along, self.fp8_communication, self.use_zbv

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        """[..., in_features] to this rank's output features, or to all with `gather_output`."""
        output = self.fp8_product(input_, None if self.skip_bias_add else self.bias)
        if output is None:
            return super().forward(input_)
        if self.gather_output:
            output = self._gather_output(output)
        return (output, self.bias) if self.skip_bias_add else output

    def _gather_output(self, output: torch.Tensor) -> torch.Tensor:
        # looked up now: a patch may have put another there since
        return _operation.gather_forward_split_backward(
            output, dim=-1, process_group=self.process_group, fp8_communication=self.fp8_communication
        )


class RowLayer(ShardedLayer):
    """A layer whose input features are spread over a group. Its bias is added once, after the reduction."""

    alone = RowParallel
    along_sequence = SequenceRow

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        """This rank's input features, or with `parallel_input` off all of them, to [..., out_features]."""
        part = input_ if self.parallel_input else self._split_input(input_)
        output = self.fp8_product(part, None)
        if output is None:
            return super().forward(input_)
        if self.skip_bias_add:
            return output, self.bias
        return output if self.bias is None else output + self.bias

    def _split_input(self, input_: torch.Tensor) -> torch.Tensor:
        return split_forward_gather_backward(
            input_, dim=-1, process_group=self.process_group, fp8_communication=self.fp8_communication
        )

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        """Why a layer cannot turn into this class."""
        if getattr(module, "stream_chunk_num", 1) > 1:
            return "stream_chunk_num > 1 serves inference alone"
        return None

"""FP8 forms of shardformer's linear layers, one class for each of its own, and the conversion of a sharded model.

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
from colossalai.shardformer.layer.linear import (
    Linear1D_Col,
    Linear1D_Row,
    LinearWithGradAccum,
    PaddingLMHead,
    VocabParallelLMHead1D,
)
from colossalai.shardformer.layer.qkv_fused_linear import (
    FusedLinear,
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    gather_forward_split_backward_fused_qkv,
    split_forward_gather_backward_fused_qkv,
)
from colossalai.shardformer.layer.utils import is_share_sp_tp
from torch import nn

from fp8booster.colossal.compressed_groups import encoding_of
from fp8booster.colossal.pipeline import defer_weight_gradient
from fp8booster.comm.encoding import DEFAULT
from fp8booster.config import FP8Config
from fp8booster.nn import FP8Layer
from fp8booster.nn.convert import KINDS, Kinds, convert_to_fp8
from fp8booster.nn.linear.exchange import Exchange
from fp8booster.nn.linear.functional import Defer
from fp8booster.nn.parallel.tensor_parallel import ColumnParallel, RowParallel, SequenceColumn, SequenceRow

LayerOutput = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]
"""The output, or with `skip_bias_add` output and bias."""


class _ShardedLayer(FP8Layer):
    """The common part of shardformer's layers."""

    skip_bias_add: bool
    use_zbv: bool
    adds_bias_to_sum: ClassVar[bool] = False

    alone: ClassVar[type[Exchange]]
    along_sequence: ClassVar[type[Exchange]]

    def fp8_exchange(self) -> Exchange | None:
        """Return the exchange of the layer's group: in Colossal-AI with `seq_parallel_mode` and without."""
        if dist.get_world_size(self.process_group) == 1:
            return None
        encoding = (encoding_of(self.process_group) or DEFAULT) if self.fp8_communication else None
        # in these modes each rank of the group holds a part of the sequence, which the product gathers or scatters
        if is_share_sp_tp(self.seq_parallel_mode):
            dimension = getattr(self, "seq_parallel_dim", 1)
            return self.along_sequence(self.process_group, dimension, encoding=encoding)
        return self.alone(self.process_group, encoding=encoding)

    def fp8_defer(self) -> Defer | None:
        """Return what the passes for weights of the zero-bubble schedule work off; None under others."""
        return defer_weight_gradient(self.held_weight) if self.use_zbv else None

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        """[..., input features of this rank, or all] to [..., output features of this rank, or all], by the options."""
        # a bias within a row parallel product would be added by each rank
        in_product = None if self.skip_bias_add or self.adds_bias_to_sum else self.bias
        output = self.fp8_product(self._own_part(input_), in_product)
        if output is None:
            return super().forward(input_)
        output = self._whole(output)
        if self.skip_bias_add:
            return output, self.bias
        return output + self.bias if self.adds_bias_to_sum and self.bias is not None else output

    def _own_part(self, input_: torch.Tensor) -> torch.Tensor:
        return input_

    def _whole(self, output: torch.Tensor) -> torch.Tensor:
        return output


class _WholeLayer(_ShardedLayer):
    """A layer whose weight every rank holds whole."""

    def fp8_exchange(self) -> Exchange | None:
        return None

    def fp8_merges_by(self) -> Hashable | None:
        return None if self.skip_bias_add else (type(self), self.use_zbv)


class _ColumnLayer(_ShardedLayer):
    """A layer whose output features are spread over a group."""

    alone = ColumnParallel
    along_sequence = SequenceColumn

    def fp8_merges_by(self) -> Hashable | None:
        if self.skip_bias_add or self.gather_output:
            return None
        along = self.seq_parallel_mode, getattr(self, "seq_parallel_dim", 1)
        return type(self), self.process_group, along, self.fp8_communication, self.use_zbv

    def _whole(self, output: torch.Tensor) -> torch.Tensor:
        return self._gathered(output) if self.gather_output else output

    def _gathered(self, output: torch.Tensor) -> torch.Tensor:
        # looked up now: a patch may have put another there since
        return _operation.gather_forward_split_backward(
            output, dim=-1, process_group=self.process_group, fp8_communication=self.fp8_communication
        )


class _RowLayer(_ShardedLayer):
    """A layer whose input features are spread over a group. Its bias is added once, after the reduction."""

    alone = RowParallel
    along_sequence = SequenceRow
    adds_bias_to_sum = True

    def _own_part(self, input_: torch.Tensor) -> torch.Tensor:
        return input_ if self.parallel_input else self._split(input_)

    def _split(self, input_: torch.Tensor) -> torch.Tensor:
        return split_forward_gather_backward(
            input_, dim=-1, process_group=self.process_group, fp8_communication=self.fp8_communication
        )

    @classmethod
    def why_not(cls, module: Any) -> str | None:
        if getattr(module, "stream_chunk_num", 1) > 1:
            return "stream_chunk_num > 1 serves inference alone"
        return None


class FP8LinearWithGradAccum(_WholeLayer, LinearWithGradAccum):
    """Not parallel; takes the place of nn.Linear in zero-bubble pipelines."""

    original = LinearWithGradAccum


class FP8Linear1DCol(_ColumnLayer, Linear1D_Col):
    original = Linear1D_Col


class FP8Linear1DRow(_RowLayer, Linear1D_Row):
    original = Linear1D_Row


class FP8VocabParallelLMHead1D(VocabParallelLMHead1D, FP8Linear1DCol):
    """The head over a padded vocabulary, column parallel: Colossal-AI's forward cuts the padding off the logits."""

    original = VocabParallelLMHead1D


class FP8PaddingLMHead(FP8Layer, PaddingLMHead):
    """The head over a padded vocabulary, not parallel."""

    original = PaddingLMHead

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in_features] to logits without the padding."""
        output = self.fp8_product(input, self.bias)
        return super().forward(input) if output is None else output[..., : self.old_num_embeddings]


class _FusedColumnLayer(_ColumnLayer):
    """A layer whose output features are those of several layers, each spread over the group."""

    def _gathered(self, output: torch.Tensor) -> torch.Tensor:
        return gather_forward_split_backward_fused_qkv(output, self.split_sizes, self.process_group)


class FP8FusedLinear1DCol(_FusedColumnLayer, FusedLinear1D_Col):
    original = FusedLinear1D_Col


class FP8FusedLinear1DRow(_RowLayer, FusedLinear1D_Row):
    original = FusedLinear1D_Row

    def _split(self, input_: torch.Tensor) -> torch.Tensor:
        return split_forward_gather_backward_fused_qkv(input_, self.split_sizes, self.process_group)


class FP8FusedLinear(_WholeLayer, FusedLinear):
    original = FusedLinear


class _GPT2Layer:
    """A mixin before layers that hold their weight as [input features, output features], as GPT-2's Conv1D does.

    Sequence parallelism lies in dimension 1. As in Colossal-AI, modes that GPT-2 does not have are refused.
    """

    weight_is_transposed = True
    modes = (None, "split_gather", "ring", "ring_attn")

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        if self.seq_parallel_mode not in self.modes:
            raise ValueError(
                f"sequence_parallelism_mode={self.seq_parallel_mode!r} is not there for GPT-2's layers; use "
                + " or ".join(repr(mode) for mode in self.modes if mode)
            )
        return super().forward(input_)


class FP8GPT2FusedLinearConv1DCol(_GPT2Layer, _FusedColumnLayer, GPT2FusedLinearConv1D_Col):
    original = GPT2FusedLinearConv1D_Col


class FP8GPT2FusedLinearConv1DRow(_GPT2Layer, _RowLayer, GPT2FusedLinearConv1D_Row):
    original = GPT2FusedLinearConv1D_Row


class FP8GPT2FusedLinearConv(_GPT2Layer, _WholeLayer, GPT2FusedLinearConv):
    original = GPT2FusedLinearConv
    modes = (None, "ring_attn")


_CLASSES: tuple[type[FP8Layer], ...] = (
    FP8Linear1DCol,
    FP8Linear1DRow,
    FP8LinearWithGradAccum,
    FP8PaddingLMHead,
    FP8VocabParallelLMHead1D,
    FP8FusedLinear,
    FP8FusedLinear1DCol,
    FP8FusedLinear1DRow,
    FP8GPT2FusedLinearConv,
    FP8GPT2FusedLinearConv1DCol,
    FP8GPT2FusedLinearConv1DRow,
)

SHARDED_KINDS: Kinds = {**KINDS, **{cls.original: cls for cls in _CLASSES}}
"""The linear layers of shardformer, and those that stay nn.Linear, with the FP8 form of each."""


def convert_sharded_to_fp8(model: nn.Module, config: FP8Config, *, communication: bool) -> nn.Module:
    """Convert, as `nn.convert_to_fp8`, a model whose layers shardformer may have replaced.

    Call it after sharding and before an optimizer is wrapped. Layers keep their parameters, paths and hooks.

    Args:
        model: sharded or not.
        config: which layers, and how; the names that its `layers` is given are paths in the model.
        communication: send FP8 around the products, and in what shardformer's other modules exchange, as far as the
            groups are known to `compress_groups`.

    Returns:
        The model.

    Raises:
        ValueError: no linear layer is left to compute in FP8.
    """
    for module in model.modules():
        # not of linear layers alone: embeddings exchange by the same groups
        if hasattr(module, "fp8_communication"):
            module.fp8_communication = communication
    return convert_to_fp8(model, config, kinds=SHARDED_KINDS)

"""FP8 forms of shardformer's linear layers, one class for each of its own (shardformer/layer/linear.py).

Those behind, of fused layers, have nn.Linear's layout or GPT-2's (qkv_fused_linear.py): GPT-2's Conv1D holds its weight
as [input features, output features], and sequence parallelism there lies in dimension 1.
"""

from __future__ import annotations

import torch
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

from fp8booster.colossal.tensor.layers import ColumnLayer, LayerOutput, RowLayer, WholeLayer
from fp8booster.nn import FP8Layer


class FP8LinearWithGradAccum(WholeLayer, LinearWithGradAccum):
    """Not parallel; takes the place of nn.Linear in zero-bubble pipelines."""

    original = LinearWithGradAccum


class FP8Linear1DCol(ColumnLayer, Linear1D_Col):
    original = Linear1D_Col


class FP8Linear1DRow(RowLayer, Linear1D_Row):
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


class _FusedColumnLayer(ColumnLayer):
    """Its output features are those of several layers, each spread over the group."""

    def _gather_output(self, output: torch.Tensor) -> torch.Tensor:
        return gather_forward_split_backward_fused_qkv(output, self.split_sizes, self.process_group)


class FP8FusedLinear1DCol(_FusedColumnLayer, FusedLinear1D_Col):
    original = FusedLinear1D_Col


class FP8FusedLinear1DRow(RowLayer, FusedLinear1D_Row):
    original = FusedLinear1D_Row

    def _split_input(self, input_: torch.Tensor) -> torch.Tensor:
        return split_forward_gather_backward_fused_qkv(input_, self.split_sizes, self.process_group)


class FP8FusedLinear(WholeLayer, FusedLinear):
    original = FusedLinear


class _GPT2Layer:
    """Refuses, as in Colossal-AI, the modes of sequence parallelism that GPT-2 does not have."""

    weight_is_transposed = True
    modes = (None, "split_gather", "ring", "ring_attn")

    def forward(self, input_: torch.Tensor) -> LayerOutput:
        """The forward of the class that it is mixed into, under a mode that this class has."""
        if self.seq_parallel_mode not in self.modes:
            raise ValueError(
                f"sequence_parallelism_mode={self.seq_parallel_mode!r} is not there for GPT-2's layers; use "
                + " or ".join(repr(mode) for mode in self.modes if mode)
            )
        return super().forward(input_)


class FP8GPT2FusedLinearConv1DCol(_GPT2Layer, _FusedColumnLayer, GPT2FusedLinearConv1D_Col):
    original = GPT2FusedLinearConv1D_Col


class FP8GPT2FusedLinearConv1DRow(_GPT2Layer, RowLayer, GPT2FusedLinearConv1D_Row):
    original = GPT2FusedLinearConv1D_Row


class FP8GPT2FusedLinearConv(_GPT2Layer, WholeLayer, GPT2FusedLinearConv):
    original = GPT2FusedLinearConv
    modes = (None, "ring_attn")

"""FP8 forms of shardformer's linear layers, one class for each native class (shardformer/layer/linear.py)."""

from __future__ import annotations

import torch
from colossalai.shardformer.layer.linear import (
    Linear1D_Col,
    Linear1D_Row,
    LinearWithGradAccum,
    PaddingLMHead,
    VocabParallelLMHead1D,
)

from fp8booster.colossal.tensor.layers import ColumnLayer, RowLayer, WholeLayer
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

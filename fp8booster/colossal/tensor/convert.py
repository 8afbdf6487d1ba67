"""A model that shardformer has sharded, turned into FP8 layers in place."""

from __future__ import annotations

from torch import nn

from fp8booster.colossal.tensor import linear
from fp8booster.config import FP8Config
from fp8booster.nn import FP8Layer
from fp8booster.nn.convert import KINDS, Kinds, convert_to_fp8

_CLASSES: tuple[type[FP8Layer], ...] = (
    linear.FP8Linear1DCol,
    linear.FP8Linear1DRow,
    linear.FP8LinearWithGradAccum,
    linear.FP8PaddingLMHead,
    linear.FP8VocabParallelLMHead1D,
    linear.FP8FusedLinear,
    linear.FP8FusedLinear1DCol,
    linear.FP8FusedLinear1DRow,
    linear.FP8GPT2FusedLinearConv,
    linear.FP8GPT2FusedLinearConv1DCol,
    linear.FP8GPT2FusedLinearConv1DRow,
)

SHARDED_KINDS: Kinds = {**KINDS, **{cls.original: cls for cls in _CLASSES}}
"""The linear layers of shardformer, and those that stay nn.Linear, with what they turn into."""


def convert_sharded_to_fp8(model: nn.Module, config: FP8Config, *, communication: bool) -> nn.Module:
    """`nn.convert_to_fp8` for a model whose layers shardformer may have replaced.

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
        if hasattr(module, "fp8_communication"):
            module.fp8_communication = communication
    return convert_to_fp8(model, config, kinds=SHARDED_KINDS)

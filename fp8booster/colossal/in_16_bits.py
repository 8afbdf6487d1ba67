"""Weights of FP8 layers that engines cannot keep, or gather, in FP8."""

from __future__ import annotations

from collections import Counter

from torch import nn

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.nn import FP8Layer


def count_readers(model: nn.Module) -> Counter[nn.Parameter]:
    """How many modules hold each parameter."""
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


def uncompressed_reason(
    layer: FP8Layer, *, master_weights: bool, readers: int, of_engine: str | None = None
) -> str | None:
    """Why an FP8 layer's weight is gathered in 16 bits; None where it is in FP8.

    Args:
        layer: whose weight is trained.
        master_weights: there are FP32 masters to cast from.
        readers: modules that hold the weight.
        of_engine: why the engine does not; None where it does.
    """
    if not master_weights:
        return "no master weights"  # the weight is its own master: it must not be rounded to FP8
    if of_engine is not None:
        return of_engine
    if readers > 1:
        return "shared with another module"
    if layer.why_cast_by_itself is not None:
        return layer.why_cast_by_itself
    if any(size % ALIGNMENT for size in layer.held_weight.shape):
        return f"size no multiple of {ALIGNMENT}"
    return None

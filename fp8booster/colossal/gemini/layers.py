"""FP8 layers whose parameters Gemini gathers.

Gemini gathers what a torch function reads (tensor/colo_parameter.py:54), and the FP8 product is none. So the layer
calls Gemini's hooks itself: before its forward, which gives the parameters a node in the graph that changes their state
in backward, and after it, on its output, which makes backward gather them again.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from colossalai.tensor.param_op_hook import ColoParamOpHookManager
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.chunk import ChunkManager
from torch import nn

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.colossal.gemini.weights import ChunkWeight
from fp8booster.nn import FP8Layer
from fp8booster.nn.resharded_weight import ReshardedWeight


class ReadByProduct(list):
    """Parameters that an FP8 layer reads: those in FP8 chunks need no 16-bit values."""


class GatheredLayer(nn.Module):
    """A mixin before an FP8 layer's class: its parameters are gathered for its forward and its backward."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the layer computes."""
        own = {name: value for name, value in self._parameters.items() if value is not None}
        hooks, parameters = ColoParamOpHookManager, ReadByProduct(own.values())
        with torch._C.DisableTorchFunction():
            if not hooks.has_hook():
                return super().forward(*args, **kwargs)
            self._parameters.update(zip(own, hooks.pre_op(parameters, *parameters), strict=True))
            try:
                output = super().forward(*args, **kwargs)
            finally:
                self._parameters.update(own)
            return hooks.post_op(parameters, output)


@functools.cache
def _gathered_class(layer: type[FP8Layer]) -> type[FP8Layer]:
    return type(layer.__name__, (GatheredLayer, layer), {"__module__": layer.__module__})


def gather_for_layers(model: nn.Module, manager: ChunkManager) -> None:
    """Make a model's FP8 layers read their parameters as Gemini gathers them.

    Args:
        model: its parameters registered in chunks.
        manager: of these chunks.
    """
    for module in model.modules():
        if not isinstance(module, FP8Layer):
            continue
        module.__class__ = _gathered_class(type(module))
        if is_ddp_ignored(module.weight):
            continue  # frozen: whole on every rank, so its FP8 copy may stay too
        chunk = manager.get_chunk(module.weight)
        if isinstance(chunk, FP8Chunk):
            module.fp8_weight = ChunkWeight(chunk, module.weight, module.weight_is_transposed)
            # there are no 16-bit values to compute with where that would be faster
            module.fp8_config = dataclasses.replace(module.fp8_config, always=True)
        else:
            module.fp8_weight = ReshardedWeight()

"""All FP8 weights of a model cast at once, after an optimizer step, for those who ask for it.

Without it each layer casts its weight when it first runs after a step: two launches a layer. Many small layers wait for
these; `refresh_weights` casts all of them by two launches, into memory that stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import nn

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.many_cast import ManyCast
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.cached import CachedWeight
from fp8booster.tensor import QuantizedMatrix


class _Kind(NamedTuple):
    """What the weights of one cast have in common."""

    source: torch.dtype
    device: torch.device
    weight_format: torch.dtype
    power_of_two: bool


class _Plan:
    """The cast of one kind of weights, for weights that stay where they are; the copies are not filled before it ran.

    Args:
        weights: of the kind.
    """

    def __init__(self, weights: Sequence[torch.Tensor], kind: _Kind) -> None:
        inverse_scales = new_inverse_scales(len(weights), kind.device)
        data = [weight.new_empty(weight.shape, dtype=kind.weight_format) for weight in weights]
        transposes = [weight.new_empty(weight.shape[::-1], dtype=kind.weight_format) for weight in weights]
        self.casts = ManyCast(weights, data, transposes, inverse_scales, kind.power_of_two)
        self.copies = [
            QuantizedMatrix(*each, None) for each in zip(data, transposes, inverse_scales.unbind(), strict=True)
        ]

    def serves(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether these are the weights that it was made for, where they were."""
        return [(weight.data_ptr(), weight.shape) for weight in weights] == [
            (matrix.data_ptr(), matrix.shape) for matrix in self.casts.matrices
        ]


_plans: weakref.WeakKeyDictionary[nn.Module, dict[_Kind, _Plan]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def refresh_weights(model: nn.Module) -> int:
    """Cast the weights of a model's FP8 layers at once, so that the next forward finds them cast.

    Optional: call it after an optimizer step, on the stream that runs the model, where launches cost more than casts.
    The values are those that the layers would make. They serve layers in training mode until the next change of their
    weight or the next optimizer step; after that a layer casts its weight itself, unless this is called again.

    The copies, two bytes a weight value, stay allocated as long as the model. Calling it between a forward and its
    backward makes that backward raise, as a change of the weight itself does.

    Code compiled or captured into a CUDA graph casts its weights itself and does not read these copies. Not for weights
    that an engine still gathers when the step returns, as ZeRO does with `overlap_allgather`.

    Args:
        model: holds FP8 layers. Left out, and so cast when they run, are layers with other scales than real-time
            tensorwise ones, or whose transposes are not kept, sizes that are no multiple of 16, and weights that are
            parametrized, sharded or scattered in memory, begin at no multiple of 16 bytes, or are cast by an engine.

    Returns:
        The number of layers served.
    """
    layers: dict[_Kind, list[FP8Layer]] = {}
    for module in model.modules():
        if isinstance(module, FP8Layer) and _can_be_served(module):
            weight, config = module.held_weight, module.fp8_config
            kind = _Kind(weight.dtype, weight.device, config.weight_format, config.power_of_two)
            layers.setdefault(kind, []).append(module)
    known = _plans.setdefault(model, {})
    for kind in known.keys() - layers.keys():
        del known[kind]
    for kind, served in layers.items():
        # a tied weight once
        weights: list[torch.Tensor] = list({id(layer.held_weight): layer.held_weight for layer in served}.values())
        if kind not in known or not known[kind].serves(weights):
            known.pop(kind, None)
            for layer in served:
                layer.fp8_weight.forget()  # first, so that the allocator can give the same memory again
            known[kind] = _Plan(weights, kind)
        plan = known[kind]
        plan.casts.run()
        copies = {id(weight): copy for weight, copy in zip(weights, plan.copies, strict=True)}
        for layer in served:
            copy = layer.in_product_layout(copies[id(layer.held_weight)])
            cast(CachedWeight, layer.fp8_weight).put([layer.held_weight], layer.fp8_config, copy)
    return sum(map(len, layers.values()))


def _can_be_served(layer: FP8Layer) -> bool:
    weight = layer.held_weight
    return (
        type(weight) is nn.Parameter  # no shard, and not computed anew at each look
        and layer.why_cast_by_itself is None
        and not layer.fp8_config.remembers_amaxes
        and layer.fp8_config.keeps_transposes
        and not weight.is_inference()
        and weight.device.type in ("cpu", "cuda")
        and weight.dim() == 2
        and weight.numel() > 0
        and not any(size % ALIGNMENT for size in weight.shape)
        and weight.is_contiguous()
        and weight.data_ptr() % ALIGNMENT == 0
        and isinstance(layer.fp8_weight, CachedWeight)
        and not layer.fp8_weight.is_provided([weight])
    )

"""Modules whose parameters Gemini gathers, and that read them past torch's functions: FP8 layers and what is fused.

Gemini gathers what a torch function reads (tensor/colo_parameter.py:54), and the FP8 product and fused kernels are
none. So these modules call Gemini's hooks themselves: before they compute, which gives the parameters a node in the
graph that changes their state in backward, and after it, on what they made, which makes backward gather them again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from colossalai.tensor.param_op_hook import ColoParamOpHookManager
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.chunk import ChunkManager
from torch import nn

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.colossal.gemini.weights import ChunkWeight
from fp8booster.nn import FP8Layer, FP8Linear
from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.fused.causal_lm_loss import fused_head
from fp8booster.nn.fused.head import HeldHead
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.fused.norm import FusedNorm
from fp8booster.nn.linear.delivered_amax import deliver_amax, delivered_amax
from fp8booster.nn.modules import PASSES_ON, change_class, mixed_class
from fp8booster.nn.weights.resharded import ReshardedWeight

Made = TypeVar("Made", bound=torch.Tensor | tuple[torch.Tensor, ...] | None)


class ReadByProduct(list):
    """Parameters that an FP8 layer or a fused kernel reads: those in FP8 chunks need no 16-bit values."""


def while_gathered(modules: Sequence[nn.Module], compute: Callable[[], Made]) -> Made:
    """What `compute` makes of the parameters of some modules, which are gathered for it, and again for its backward.

    Args:
        modules: whose own parameters `compute` reads.
        compute: makes tensors.
    """
    own = [
        (module, name, value) for module in modules for name, value in module._parameters.items() if value is not None
    ]
    hooks, parameters = ColoParamOpHookManager, ReadByProduct(value for _, _, value in own)
    with torch._C.DisableTorchFunction():
        if not hooks.has_hook():
            return compute()
        for (module, name, _), value in zip(own, hooks.pre_op(parameters, *parameters), strict=True):
            module._parameters[name] = value
        try:
            made = compute()
        finally:
            for module, name, value in own:
                module._parameters[name] = value
        return _with_its_amax(made, hooks.post_op(parameters, made))


def _with_its_amax(made: Made, returned: Made) -> Made:
    """What the hooks return is another tensor object."""
    before, after = (each if isinstance(each, tuple) else (each,) for each in (made, returned))
    for one, other in zip(before, after, strict=True):
        amax = None if one is None else delivered_amax(one)
        if amax is not None:
            deliver_amax(other, amax)
    return returned


class GatheredModule(nn.Module):
    """A mixin before a module's class: its parameters are gathered for its forward and its backward."""

    original_class: ClassVar[type[nn.Module]]

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"original_class": original, "head_class": original}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the module computes."""
        return while_gathered([self], functools.partial(super().forward, *args, **kwargs))

    def fp8_merges_by(self) -> Hashable | None:
        """As for the class that it was, whose product it leaves as it is."""
        return FP8Linear if self.original_class is FP8Linear else super().fp8_merges_by()


setattr(GatheredModule.forward, PASSES_ON, True)


class GatheredHead(GatheredModule, HeldHead):
    """A mixin before the class of a head whose loss is fused."""

    def while_whole(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `compute` makes of the head's parameters, gathered."""
        return while_gathered([self], compute)


class GatheredMergedLayers(MergedLayers):
    """Merged layers whose parameters are gathered together for the one product and its backward."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor | None:
        """As `MergedLayers`."""
        with torch._C.DisableTorchFunction():  # to look at a parameter is to read it, for Gemini
            return super().__call__(input)

    def _product(self, input: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        product = super()._product  # of the weights as they are gathered then
        return while_gathered(self.layers, lambda: product(input, self.weights))


def gather_for_layers(model: nn.Module, manager: ChunkManager) -> None:
    """Make a model's FP8 layers, and what is fused, read their parameters as Gemini gathers them.

    Args:
        model: its parameters registered in chunks.
        manager: of these chunks.
    """
    head = fused_head(model)
    for module in model.modules():
        if module is head:
            change_class(module, mixed_class(GatheredHead, type(module)))
        elif isinstance(module, (FP8Layer, FP8Experts, FusedNorm)):
            change_class(module, mixed_class(GatheredModule, type(module)))
        if isinstance(module, FP8Experts):
            module.fp8_config = dataclasses.replace(module.fp8_config, always=True)  # as layers, below
            module.follow_resharding()
        if not isinstance(module, FP8Layer) or is_ddp_ignored(module.held_weight):
            continue  # frozen: whole on every rank, so its FP8 copy may stay too
        # for any number of tokens: ranks with different ones must gather and reduce chunks in one order, and layers
        # that run as one product do it in another than one by one; nor has an FP8 chunk 16-bit values to compute with
        module.fp8_config = dataclasses.replace(module.fp8_config, always=True)
        if module._parameters.get("weight") is None:
            continue  # computed anew for each forward, as by spectral norm, from a parameter that Gemini gathers then
        chunk = manager.get_chunk(module.held_weight)
        if isinstance(chunk, FP8Chunk):
            module.fp8_weight = ChunkWeight(chunk, [module.held_weight], module.weight_is_transposed)
            chunk.layers[module.held_weight] = module
        else:
            module.fp8_weight = ReshardedWeight(module.weight_is_transposed)
    for merged in merged_layers(model):
        change_class(merged, GatheredMergedLayers)
        _gather_together(merged, manager)


def _gather_together(merged: MergedLayers, manager: ChunkManager) -> None:
    """Let merged layers read their weights as they lie in chunks, or run one by one where they cannot."""
    weights = merged.weights
    ignored = [is_ddp_ignored(weight) for weight in weights]
    if all(ignored):
        return
    if any(ignored):
        merged.fp8_weight.refusal = "only some of the weights are trained"
        return
    chunks = [manager.get_chunk(weight) for weight in weights]
    in_fp8 = [isinstance(chunk, FP8Chunk) for chunk in chunks]
    if not any(in_fp8):
        merged.fp8_weight = ReshardedWeight()
    elif not all(in_fp8):
        merged.fp8_weight.refusal = "only some of the weights lie in FP8 chunks"
    elif not chunks[0].shares_scale(weights):
        merged.fp8_weight.refusal = "the weights do not lie side by side in one chunk"
    else:
        merged.fp8_weight = ChunkWeight(chunks[0], weights)

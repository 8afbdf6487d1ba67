"""Modules whose parameters Gemini gathers, and that read them past torch's functions: FP8 layers and what is fused.

Gemini gathers what a torch function reads (tensor/colo_parameter.py:54), and the FP8 product and fused kernels are
none. So these modules call Gemini's hooks themselves: before they compute, which gives the parameters a node in the
graph that changes their state in backward, and after it, on what they made, which makes backward gather them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from colossalai.tensor.param_op_hook import ColoParamOpHookManager
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini.chunk import TensorState
from colossalai.zero.gemini.gemini_hook import GeminiZeROHook
from torch import nn

from fp8booster.colossal.gemini.chunks import ChunkWeight, FP8Chunk
from fp8booster.nn import FP8Layer
from fp8booster.nn.experts.alike import Look
from fp8booster.nn.experts.grouped import GroupedExperts, grouped_experts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.fused.causal_lm_loss import HeldHead, fused_head
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.fused.norm import FusedNorm
from fp8booster.nn.modules import PASSES_ON, change_class, mixed_class
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax
from fp8booster.nn.weights.holder import FP8Module, weight_holders
from fp8booster.nn.weights.resharded import ReshardedWeight

Made = TypeVar("Made", bound=torch.Tensor | tuple[torch.Tensor, ...] | None)


class ReadByProduct(list):
    """Parameters that an FP8 layer or a fused kernel reads: those in FP8 chunks need no 16-bit values."""


def while_gathered(modules: Sequence[nn.Module], compute: Callable[[], Made]) -> Made:
    """Run `compute` on the parameters of some modules, which are gathered for it, and again for its backward.

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
    # what the hooks return is another tensor object, which has not the amax that the next cast would look for
    before, after = (each if isinstance(each, tuple) else (each,) for each in (made, returned))
    for one, other in zip(before, after, strict=True):
        amax = None if one is None else delivered_amax(one)
        if amax is not None:
            deliver_amax(other, amax)
    return returned


class GatheredModule(nn.Module):
    """A mixin before a module's class: its parameters are gathered for its forward and its backward."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its parameters gathered."""
        return while_gathered([self], functools.partial(super().forward, *args, **kwargs))


setattr(GatheredModule.forward, PASSES_ON, True)


class GatheredHead(GatheredModule, HeldHead):
    """A mixin before the class of a head whose loss is fused."""

    def while_whole(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run `compute` on the head's parameters, gathered."""
        return while_gathered([self], compute)


class GatheredMergedLayers(MergedLayers):
    """Merged layers whose parameters are gathered together for the one product and its backward."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor | None:
        """As `MergedLayers`."""
        with torch._C.DisableTorchFunction():  # to look at a parameter is to read it, for Gemini
            return super().__call__(input)

    def _product(self, input: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        # asked for here: a lambda has no first argument, by which `super()` finds the object
        product = super()._product  # of the weights as they are gathered then
        return while_gathered(self.layers, lambda: product(input, self.weights))


class GatheredGroupedExperts(GroupedExperts):
    """Experts whose parameters are gathered together for the grouped products and their backward."""

    are_whole = True

    def mix(self, routed: Routed) -> torch.Tensor | None:
        """Mix as `GroupedExperts` does, and read no parameter by looking at it."""
        with torch._C.DisableTorchFunction():  # to look at a parameter is to read it, for Gemini
            return super().mix(routed)

    def _gathered(self, look: Look, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        return while_gathered([*look.up.layers, *look.down.layers], compute)


def gather_for_layers(model: nn.Module) -> None:
    """Make a model's FP8 layers, and what is fused, read their parameters as Gemini gathers them.

    Args:
        model: its parameters registered in chunks; layers whose weights lie in FP8 chunks read them there.
    """
    head = fused_head(model)
    for module in model.modules():
        if module is head:
            change_class(module, mixed_class(GatheredHead, type(module)))
        elif isinstance(module, (FP8Module, FusedNorm)):
            change_class(module, mixed_class(GatheredModule, type(module)))
        # for any number of tokens: ranks with different ones must gather and reduce chunks in one order, and layers
        # that run as one product do it in another than one by one; nor has an FP8 chunk 16-bit values to compute with
        for name, holder in weight_holders(module).items():
            if isinstance(module, FP8Layer) and is_ddp_ignored(holder.held_weight):
                continue
            # one that is computed anew for each forward, as by spectral norm, is gathered as what it is computed from
            if module._parameters.get(name) is not None and not isinstance(holder.fp8_weight, ChunkWeight):
                holder.fp8_weight = ReshardedWeight(holder.weight_is_transposed)
            holder.fp8_weight.always = True
    for grouped in grouped_experts(model):
        change_class(grouped, GatheredGroupedExperts)
    for merged in merged_layers(model):
        change_class(merged, GatheredMergedLayers)
        trained = [not is_ddp_ignored(weight) for weight in merged.weights]
        if any(trained) and not all(trained):
            merged.fp8_weight.refusal = "only some of the weights are trained"
        elif any(trained):  # else whole on every rank, so their FP8 copy may stay too
            if merged.fp8_weight.refusal is None and not isinstance(merged.fp8_weight, ChunkWeight):
                merged.fp8_weight = ReshardedWeight()
            merged.fp8_weight.always = True


class FP8GeminiHook(GeminiZeROHook):
    """Leaves chunks of weights where they are while vectors are read, and decodes FP8 weights for other operators."""

    def pre_op(self, params: list[torch.Tensor]) -> None:
        """Gather the chunks of these parameters, before a forward or a backward reads them."""
        manager = self._chunk_manager
        managed = [parameter for parameter in params if not is_ddp_ignored(parameter)]
        chunks = [manager.get_chunk(parameter) for parameter in managed]
        if not all(chunk.keep_gathered for chunk in chunks):
            super().pre_op(params)
        else:
            # needs no memory: Colossal-AI would release what the layers before and after a norm share
            for parameter, chunk in zip(managed, chunks, strict=True):
                manager.trans_tensor_state(parameter, TensorState.COMPUTE)
                manager.access_chunk(chunk)
        if not isinstance(params, ReadByProduct):
            for parameter, chunk in zip(managed, chunks, strict=True):
                if isinstance(chunk, FP8Chunk):
                    chunk.decode(parameter)

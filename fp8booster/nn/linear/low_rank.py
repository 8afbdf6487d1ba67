"""LoRA on layers whose weight is frozen in FP8: their products and the adapters', as one differentiable function.

    y  = x @ w.T + s (x @ a.T) @ b.T        Hu et al., arXiv 2106.09685, section 4.1; w is frozen
    dx = dy @ w  + s (dy @ b) @ a

Each low-rank product is added by the multiplication that makes it, into what the FP8 product wrote: no tensor of y's
size is made besides y. Layers of one input share its cast, one product by their a's, and one cast of their gradients.
Backward finds x for the gradient of a as fprop read it, in FP8: one byte a value. Where a recipe came with x, as with
SwiGLU's output, nothing of x is saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.product import product
from fp8booster.nn.linear.frozen import FrozenFP8Linear
from fp8booster.nn.linear.functional import fprop, once_differentiable, output_dtype, unsafe_view
from fp8booster.nn.modules import must_be_called
from fp8booster.nn.weights.delivered import Recipe, delivered_recipe
from fp8booster.nn.weights.source import BackwardWeight, transposed_in_backward
from fp8booster.scaling import OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix


class LowRank(NamedTuple):
    """A frozen layer, and what its adapter adds to it."""

    layer: FrozenFP8Linear
    a: torch.Tensor
    """[r, K]."""
    b: torch.Tensor
    """[N, r]."""
    scaling: float


def low_rank_of(module: Any) -> LowRank | None:
    """Return what a layer of peft's with LoRA computes, if it is that on a frozen FP8 layer and no more.

    None where peft's own forward has more to do: dropout, DoRA, several adapters, one that is merged or disabled, hooks
    on what is inside.
    """
    peft = sys.modules.get("peft.tuners.lora.layer")
    if peft is None or type(module) is not peft.Linear:
        return None
    if module.disable_adapters or module.merged or len(active := module.active_adapters) != 1:
        return None
    name, inside = active[0], module._modules
    layer = inside["base_layer"]
    if name not in inside["lora_A"] or type(layer) is not FrozenFP8Linear or module.use_dora[name]:
        return None
    if name in getattr(module, "lora_variant", ()):  # newer versions of peft have something else than LoRA there
        return None
    a, b, dropout = (inside[kind][name] for kind in ("lora_A", "lora_B", "lora_dropout"))
    plain = type(a) is type(b) is nn.Linear and b.bias is None and type(dropout) is nn.Identity
    if not plain or any(map(must_be_called, (layer, a, b))):
        return None
    return LowRank(layer, a.weight, b.weight, module.scaling[name])


def low_rank_adapters(model: nn.Module) -> set[int]:
    """Return the ids of what LoRA multiplies by where it is on a frozen FP8 layer."""
    return {
        id(module)
        for adapted in model.modules()
        if isinstance(adapted._modules.get("base_layer"), FrozenFP8Linear)
        for name in ("lora_A", "lora_B")
        if (factors := adapted._modules.get(name)) is not None
        for module in factors.children()
    }


def low_rank_product(input: torch.Tensor, modules: Sequence[nn.Module]) -> torch.Tensor | None:
    """Return what layers with adapters make of one input, side by side; None: call them one by one.

    They are called where one is not as `low_rank_of` knows it, has finer scales than one a tensor, a bias that trains,
    or hooks and others beside it; and in compiled code.

    Args:
        input: [..., K], of the dtype that the frozen weights decode to, or under autocast. Adapters are multiplied in
            the dtype of the outputs.
        modules: in the order of their outputs.

    Returns:
        [..., sum of output features], of the input's dtype, or of autocast's, which nothing else holds.
    """
    if torch.compiler.is_compiling() or input.numel() == 0:
        return None
    if len(modules) > 1 and any(map(must_be_called, modules)):
        return None
    dtype = output_dtype(input)
    parts = [low_rank_of(module) for module in modules]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not all(_fits(part, input, known) for part in known):
        return None
    first = known[0].layer
    x = first.cast_input(input)
    for part in known[1:]:
        part.layer.in_fp8[input.numel() // input.shape[-1]] = True
    of_a = torch.is_grad_enabled() and any(part.a.requires_grad for part in known)
    recipe = delivered_recipe(input) if of_a else None
    source = () if recipe is None else recipe.saved
    how = _Call(tuple(known), None if recipe is None else recipe.without_saved())
    # adapters may be in FP32, as peft makes them: their products are those of autocast, and their gradients in FP32
    factors = [each.to(dtype) for part in known for each in (part.a, part.b)]
    factors = factors[::2] + factors[1::2]
    biases = [part.layer.bias for part in known]
    return _LowRankProduct.apply(input, x, how, biases, *factors, *source)


def _fits(part: LowRank, input: torch.Tensor, parts: Sequence[LowRank]) -> bool:
    """Tell whether a layer runs in the one function with the others."""
    layer, first = part.layer, parts[0].layer
    bias = layer.bias
    if layer.fp8_config.finer_scales or (bias is not None and bias.requires_grad):
        return False
    if input.dtype != layer.weight_dtype and not torch.is_autocast_enabled(input.device.type):
        return False
    if len(parts) == 1:
        return True
    return (
        layer.input_amax is None
        and (layer.fp8_config is first.fp8_config or layer.fp8_config == first.fp8_config)
        and layer.fp8_shape[0] % ALIGNMENT == 0
    )


@dataclass(eq=False)
class _Call:
    """The layers and the recipe of one call."""

    parts: tuple[LowRank, ...]
    recipe: Recipe | None
    """What makes x again; None: backward finds it in FP8."""


class _LowRankProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,  # [..., K], M rows in all
        x: QuantizedMatrix,  # [M16, K16]
        how: _Call,
        biases: list[torch.Tensor | None],  # [N] each
        *tensors: torch.Tensor,  # a [r, K] of each layer, b [N, r] of each, `Recipe.saved`
    ) -> torch.Tensor:  # [..., sum of N]
        parts, count = how.parts, len(how.parts)
        a, b, source = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        dtype = a[0].dtype
        matrix = input.detach().reshape(-1, input.shape[-1]).to(dtype)
        products = []
        weights: list[BackwardWeight] = []
        for part, bias in zip(parts, biases, strict=True):
            w, config = part.layer.quantized, part.layer.fp8_config
            weights.append(transposed_in_backward(w))
            products.append(fprop(x, w, bias, part.layer.fp8_shape[0], matrix.shape, dtype, config))
        y = products[0] if count == 1 else torch.cat(products, 1)
        low = matrix @ _stacked(a).t()
        for part, of_y, of_low, factor in zip(parts, _columns(y, b), _columns(low, a), b, strict=True):
            of_y.addmm_(of_low, factor.t(), alpha=part.scaling)
        of_a = any(ctx.needs_input_grad[_TENSORS : _TENSORS + count])
        if not source and of_a:
            source = x.data, x.inverse_scale
        ctx.save_for_backward(low, *a, *b, *source)
        ctx.how, ctx.weights = how, weights
        return unsafe_view(y, (*input.shape[:-1], y.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # [..., sum of N]
        how, parts = ctx.how, ctx.how.parts
        count = len(parts)
        low, *tensors = ctx.saved_tensors
        a, b, source = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
        for_input = ctx.needs_input_grad[0]
        for_a = any(ctx.needs_input_grad[_TENSORS : _TENSORS + count])
        dx = _base_dgrad(gradient, parts, ctx.weights) if for_input else None
        dy = gradient.reshape(-1, gradient.shape[-1])
        of_dy = _columns(dy, b)
        # the scaling on the small factor, not on the gradient, which is as large as y
        dlow = torch.cat([of @ (each * part.scaling) for of, each, part in zip(of_dy, b, parts, strict=True)], 1)
        if dx is not None:
            # added by the product itself: no second tensor of x's size
            dx = dx.addmm_(dlow, _stacked(a)).view(*gradient.shape[:-1], -1)
        das: list[torch.Tensor | None] = [None] * count
        if for_a:
            das = list(_of_a(dlow, how.recipe, source, a))
        dbs = [
            (of.t() @ of_low).mul_(part.scaling) if wanted else None
            for of, of_low, part, wanted in zip(
                of_dy, _columns(low, a), parts, ctx.needs_input_grad[_TENSORS + count :], strict=False
            )
        ]
        return dx, None, None, None, *das, *dbs, *(None,) * (len(ctx.needs_input_grad) - _TENSORS - 2 * count)


_TENSORS = 4
"""Where the tensors begin among the arguments of `_LowRankProduct`."""


def _base_dgrad(
    gradient: torch.Tensor, parts: Sequence[LowRank], weights: Sequence[BackwardWeight]
) -> torch.Tensor:  # [M, K]
    """Return the input's gradient through the frozen weights, of one cast of the gradients of all their outputs."""
    first = parts[0].layer
    config = first.fp8_config
    dy = first.fp8_casts.quantize(OUTPUT_GRADIENT, gradient)
    rows, width = prod(gradient.shape[:-1]), first.fp8_shape[1]
    begin, dx = 0, None
    for weight in weights:
        transpose, scale = weight()
        outputs = transpose.shape[1]
        of_part = product(
            dy.data[:, begin : begin + outputs],
            transpose,
            dy.inverse_scale,
            scale,
            out_dtype=gradient.dtype,
            **config.product_options["dgrad"],
            shape=(rows, width),
        )
        dx = of_part if dx is None else dx.add_(of_part)
        begin += outputs
    return cast(torch.Tensor, dx)


def _of_a(
    dlow: torch.Tensor, recipe: Recipe | None, source: Sequence[torch.Tensor], a: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of a, from x recomputed as it was, or as fprop read it."""
    rows, columns = len(dlow), a[0].shape[1]
    if recipe is not None:
        gradient = dlow.t() @ recipe.matrix(*source)[0].to(dlow.dtype)
    else:
        data, inverse_scale = source
        # a value of FP8 is one of BF16 too; the scale comes after the sum
        gradient = (dlow.t() @ data[:rows, :columns].to(dlow.dtype)) * inverse_scale
    return gradient.to(dlow.dtype).split([len(each) for each in a])


def _stacked(factors: Sequence[torch.Tensor]) -> torch.Tensor:
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


def _columns(matrix: torch.Tensor, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the columns of a matrix that belong to each factor, as many as it has rows."""
    return matrix.split([len(each) for each in factors], 1)

"""The linear layers of many experts as three grouped FP8 products, differentiable.

Shape legend: M rows, sorted by expert and padded (`kernels.grouped_product.Groups`), of G experts; K input features,
N output features. An expert's N may consist of P layers of N / P features that read one input, such as gate and up.

    fprop  y  = x @ w.T     [M, K] by [G, N, K]
    dgrad  dx = dy @ w      [M, N] by [G, K, N]
    wgrad  dw = dy.T @ x    [N, M] by [K, M], for each expert over its own rows: [G, N, K]

Weights are stacked by rows, or lie as [G, K, N], as some models hold those of all experts: then fprop reads the
transpose, dgrad what lies there, and wgrad is [K, M] by [N, M].

The kernel multiplies E4M3 by E4M3 alone, so gradients are E4M3 here where one layer's are E5M2: three bits of mantissa
instead of two, and values under 2^-18.8 of the largest of all experts' become zero. Inputs and gradients have one scale
for all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.kernels.grouped_product import Groups, grouped_product, summed_product
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.linear.functional import once_differentiable
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.source import BackwardWeight
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix

FAST_SUM = 2048
"""Sums of at most so many products are accumulated fast in dgrad and wgrad too, where fprop's are, which are longer in
most models. Of this length they err by 0.19 %, exact ones by 0.17 %, which is BF16's rounding; and exact ones take
grouped products of small experts up to three times as long (benchmarks/results/h100/experts-accumulation.md)."""

UNEVEN = 4
"""An expert may get so many times as many rows as the mean, which alone the host knows."""


class GroupedWeight(NamedTuple):
    """The weights of G experts in FP8, stacked by rows."""

    data: torch.Tensor
    """[G * N, K] E4M3; of transposed weights [N, G * K]."""

    transpose: torch.Tensor
    """[K, G * N] E4M3; of transposed weights [G * K, N]; empty: made in backward."""

    inverse_scales: torch.Tensor
    """float32 [G, P], one for each of an expert's P layers; P is 1 where they share one."""

    fprop_scales: torch.Tensor
    """float32 [G, N]: the same for each output feature."""

    is_transposed: bool = False
    """The weights lie as [G, K, N]."""

    @classmethod
    def of(
        cls, data: torch.Tensor, transpose: torch.Tensor, inverse_scales: torch.Tensor, is_transposed: bool = False
    ) -> GroupedWeight:
        """From all but the scales written out."""
        experts, layers = inverse_scales.shape
        features = len(data) // (layers if is_transposed else experts * layers)
        written_out = inverse_scales.unsqueeze(2).expand(experts, layers, features)
        return cls(data, transpose, inverse_scales, written_out.reshape(experts, -1).contiguous(), is_transposed)


def cast_experts(weight: torch.Tensor, experts: int, casts: Casts) -> GroupedWeight:
    """Cast the weights of all experts under one scale.

    Args:
        weight: [G * N, K], BF16, FP16 or FP32; N and K are multiples of 16.
        experts: G.
        casts: of the layers that are one product; their configuration tells whether the transpose is made now.
    """
    cast = casts.quantize_weight(weight, transposed=casts.config.keeps_transposes)
    return under_one_scale(cast, experts)


def under_one_scale(cast: QuantizedMatrix, experts: int, is_transposed: bool = False) -> GroupedWeight:
    """The weights of all experts, cast as one matrix.

    Args:
        cast: [G * N, K]; of transposed weights [N, G * K].
        experts: G.
        is_transposed: they lie as [G, K, N].
    """
    return GroupedWeight.of(cast.data, cast.transpose, cast.inverse_scale.expand(experts, 1), is_transposed)


def grouped_linear(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    w: GroupedWeight,
    groups: Groups,
    casts: Casts,
    weight_gradient_factors: torch.Tensor | float = 1.0,
    backward_weight: BackwardWeight | None = None,
) -> torch.Tensor:
    """Each expert's linear layers on its rows.

    Args:
        input: [M, K] BF16; receives the input's gradient.
        weights: [..., K], or of transposed weights [..., N], in the order in which they lie in `w`; they receive
            gradients, and their values are not read.
        w: their FP8 copy.
        groups: of the M rows. Those that pad a group must be zeros, and get gradients of zeros.
        casts: of the layers that are one product; formats are E4M3.
        weight_gradient_factors: multiply the gradients of the weights, not of the input: a number or float32 [G].
        backward_weight: backward asks it for the transpose in `w`, and holds none itself.

    Returns:
        [M, N] BF16.
    """
    for_weight = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    x = casts.quantize(INPUT, input, transposed=for_weight)
    return _GroupedLinear.apply(input, x, w, groups, casts, weight_gradient_factors, backward_weight, *weights)


def _by_expert(matrix: torch.Tensor, experts: int, stacked_by_rows: bool) -> torch.Tensor:
    """A matrix of each expert, [G, rows, columns], of all stacked by rows or by columns; each row is contiguous."""
    if stacked_by_rows:
        return matrix.view(experts, -1, matrix.shape[1])
    return matrix.view(len(matrix), experts, -1).transpose(0, 1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        x: QuantizedMatrix,
        w: GroupedWeight,
        groups: Groups,
        casts: Casts,
        weight_gradient_factors: torch.Tensor | float,
        backward_weight: BackwardWeight | None,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        for_input, for_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[7:])
        late = not w.transpose.numel()
        ctx.save_for_backward(
            x.transpose if for_weight else None,
            x.inverse_scale,
            (w.data if late else w.transpose) if for_input and backward_weight is None else None,
            w.inverse_scales,
        )
        ctx.groups, ctx.casts, ctx.late, ctx.factors = groups, casts, late, weight_gradient_factors
        ctx.for_input, ctx.backward_weight, ctx.is_transposed = for_input, backward_weight, w.is_transposed
        ctx.shapes = [weight.shape for weight in weights]
        return grouped_product(
            x.data,
            _by_expert(w.data, len(w.fprop_scales), not w.is_transposed),
            x.inverse_scale,
            w.fprop_scales,
            groups,
            **casts.config.product_options["fprop"],
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # [M, N]
        x8_transpose, x_inverse_scale, w8, w_inverse_scales = ctx.saved_tensors
        groups = ctx.groups
        for_input, for_weight = ctx.for_input, x8_transpose is not None
        dy = ctx.casts.quantize(OUTPUT_GRADIENT, gradient, plain=for_input, transposed=for_weight, dtype=E4M3)
        dx: torch.Tensor | None = None
        dw: Sequence[torch.Tensor | None] = (None,) * len(ctx.shapes)
        if for_input:
            if ctx.backward_weight is not None:
                w8, _ = ctx.backward_weight()
            elif ctx.late:
                w8 = transposed(w8)
            transposes = _by_expert(w8, len(w_inverse_scales), ctx.is_transposed)
            options = _options(ctx.casts.config, "dgrad", transposes.shape[2] // w_inverse_scales.shape[1])
            dx = _dgrad(dy, transposes, w_inverse_scales, groups, options)
        if for_weight:
            outputs, inputs = (dy.transpose, dy.inverse_scale), (x8_transpose, x_inverse_scale)
            (rows, scale_of_rows), (columns, scale) = (inputs, outputs) if ctx.is_transposed else (outputs, inputs)
            scales = scale_of_rows.expand(len(groups.ends))
            options = _options(ctx.casts.config, "wgrad", UNEVEN * groups.rows // len(groups.ends))
            whole = summed_product(rows, columns, scales * ctx.factors, scale, groups, **options)
            parts = whole.view(-1, whole.shape[2]).split([shape[:-1].numel() for shape in ctx.shapes])
            dw = [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]
        return dx, *(None,) * 6, *dw


def _options(config: FP8Config, name: str, length: int) -> dict[str, bool]:
    """Return the options of a product in backward whose sums are so long."""
    options = config.product_options
    fast = options["fprop"]["fast_accumulation"] and length <= FAST_SUM
    return {**options[name], "fast_accumulation": True} if fast else options[name]


def _dgrad(
    dy: QuantizedMatrix,
    transposes: torch.Tensor,  # [G, K, N]
    inverse_scales: torch.Tensor,  # [G, P]
    groups: Groups,
    options: dict[str, bool],
) -> torch.Tensor:  # [M, K]
    experts, layers = inverse_scales.shape
    inputs = transposes.shape[1]
    # scales multiply what is summed already, so each layer with a scale of its own is a sum of its own
    by_layer = transposes.unflatten(2, (layers, -1))
    gradients = dy.data.view(len(dy.data), layers, -1)
    by_products = (
        grouped_product(
            gradients[:, layer],
            by_layer[:, :, layer],
            dy.inverse_scale,
            inverse_scales[:, layer, None].expand(experts, inputs).contiguous(),
            groups,
            **options,
        )
        for layer in range(layers)
    )
    return functools.reduce(torch.Tensor.add_, by_products)

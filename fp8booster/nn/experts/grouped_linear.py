"""The linear layers of many experts as three grouped FP8 products, differentiable.

Shape legend: M rows, sorted by expert and padded (`kernels.grouped_product.Groups`), of G experts; K input features,
N output features. An expert's N may consist of P layers of N / P features that read one input, such as gate and up.

    fprop  y  = x @ w.T     [M, K] by [G, N, K]
    dgrad  dx = dy @ w      [M, N] by [G, K, N]
    wgrad  dw = dy.T @ x    [N, M] by [K, M], for each expert over its own rows: [G, N, K]

Weights are stacked by rows, or lie as [G, K, N], as some models hold those of all experts: then fprop reads the
transpose, dgrad what lies there, and wgrad is [K, M] by [N, M].

Rows may be those of tokens, of which each has k (`RowLayout`). Then the tokens are cast, once each whatever k is, and
bytes are laid out by expert: a row has no copy in 16 bits. What a product gives may be summed over the rows of a token,
in one pass from the product's rows to tokens; the gradient is cast and laid out as the tokens are. An input keeps its
FP8 tokens for backward, which lays them out again, transposed.

The kernel multiplies E4M3 by E4M3 alone, so gradients are E4M3 here where one layer's are E5M2: three bits of mantissa
instead of two, and values under 2^-18.8 of the largest of all experts' become zero. Inputs and gradients have one scale
for all experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.kernels.grouped_product import Groups, grouped_product, summed_product
from fp8booster.kernels.token_rows import gather_rows, sum_rows
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.experts.fp8_rows import FP8Rows, Rows, SendBack
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.linear.functional import applied_directly, once_differentiable
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.pinned import Copies, copies_held
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
    """float32 [G, P], one for each of an expert's P layers; [1, 1] where all share one."""

    is_transposed: bool = False
    """The weights lie as [G, K, N]."""


def cast_experts(weights: Sequence[torch.Tensor], casts: Casts) -> GroupedWeight:
    """Cast the weights of all experts under one scale.

    Args:
        weights: [..., K], BF16, FP16 or FP32, which make [G * N, K]; N and K are multiples of 16.
        casts: of the layers that are one product; their configuration tells whether the transpose is made now, which
            evaluation without gradients does not read.
    """
    is_read = casts.in_training or torch.is_grad_enabled()
    return under_one_scale(casts.quantize_stack(weights, transposed=is_read and casts.config.keeps_transposes))


def under_one_scale(cast: QuantizedMatrix, is_transposed: bool = False) -> GroupedWeight:
    """The weights of all experts, cast as one matrix.

    Args:
        cast: [G * N, K]; of transposed weights [N, G * K].
        is_transposed: they lie as [G, K, N].
    """
    return GroupedWeight(cast.data, cast.transpose, cast.inverse_scale.view(1, 1), is_transposed)


class Products(NamedTuple):
    """How the products of a call are computed."""

    groups: Groups
    casts: Casts
    """Of the layers that are one product; formats are E4M3."""

    weight_gradient_factor: float = 1.0
    """Multiplies the gradients of the weights, not of the input."""

    backward_weight: BackwardWeight | None = None
    """Backward asks it for the transpose of the weights, and for their inverse scales, float32 [], or as
    `GroupedWeight` has them; it holds none itself."""

    reads: RowLayout | None = None
    """Rows are laid out of tokens by this; None: they lie as the product reads them."""

    sums: RowLayout | None = None
    """Results are summed over the rows of each token; None: they stay rows."""

    send_back: SendBack | None = None
    """Sends the gradient of the input to where it came from; None: it came from nowhere else."""

    @property
    def filled_rows(self) -> int:
        """How many rows are not padding, as far as is known here."""
        layout = self.reads or self.sums
        # some of the choices may have no row
        return self.groups.rows if layout is None else min(self.groups.rows, layout.places.numel())


def grouped_linear(input: Rows, weights: Sequence[torch.Tensor], w: GroupedWeight, how: Products) -> torch.Tensor:
    """Each expert's linear layers on its rows.

    Args:
        input: [M, K] BF16, or [T, K] where `how` reads tokens, which may be in FP8 alone, under one scale; receives the
            input's gradient. Rows that pad a group must be zeros, and get gradients of zeros.
        weights: [..., K], or of transposed weights [..., N], in the order in which they lie in `w`, all of one shape;
            they receive gradients, and their values are not read.
        w: their FP8 copy.
        how: groups of the M rows, casts and layouts.

    Returns:
        [M, N] BF16, or [T, N] where `how` sums.
    """
    for_weight = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    if isinstance(input, FP8Rows):
        how, x, input = how._replace(send_back=input.send_back), input.matrix, input.tokens
    elif how.reads is None:
        x = how.casts.quantize(INPUT, input, transposed=for_weight)
    else:
        x = how.casts.quantize(INPUT, _not_empty(input))
    return _apply(input, x, w, how, *weights)


def _not_empty(tokens: torch.Tensor) -> torch.Tensor:
    """Return tokens, or one of zeros where there are none: kernels are not launched over nothing."""
    return tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])


def _laid_out(
    tokens: torch.Tensor, layout: RowLayout, plain: bool = True, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 tokens as rows, as `gather_rows` does."""
    return gather_rows(tokens, layout.choices, layout.of_token, plain=plain, transposed=transposed)


def _by_expert(matrix: torch.Tensor, experts: int, stacked_by_rows: bool) -> torch.Tensor:
    """A matrix of each expert, [G, rows, columns], of all stacked by rows or by columns; each row is contiguous."""
    if stacked_by_rows:
        return matrix.view(experts, -1, matrix.shape[1])
    return matrix.view(len(matrix), experts, -1).transpose(0, 1)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, x: QuantizedMatrix, w: GroupedWeight, how: Products, *weights: torch.Tensor
    ) -> torch.Tensor:
        for_input, for_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        late = not w.transpose.numel()
        save_w = for_input and how.backward_weight is None
        ctx.save_for_backward(
            (x.transpose if how.reads is None else x.data) if for_weight else None,
            x.inverse_scale,
            *(((w.data if late else w.transpose), w.inverse_scales) if save_w else (None, None)),
        )
        ctx.how, ctx.late, ctx.for_input, ctx.is_transposed = how, late, for_input, w.is_transposed
        ctx.shapes, ctx.dtype = [weights[0].shape] * len(weights), weights[0].dtype
        # parameters get their gradients as the product gives them: nothing is computed with these on the way
        ctx.given_on = Copies.held and all(each.is_leaf and each.requires_grad for each in weights)
        y = grouped_product(
            x.data if how.reads is None else _laid_out(x.data, how.reads)[0],
            _by_expert(w.data, len(how.groups.ends), not w.is_transposed),
            x.inverse_scale,
            w.inverse_scales,
            how.groups,
            **how.casts.config.product_options["fprop"],
        )
        return y if how.sums is None else sum_rows(y, how.sums.places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # [M, N], or [T, N] of sums
        x8, x_inverse_scale, w8, w_inverse_scales = ctx.saved_tensors
        how, groups, config = ctx.how, ctx.how.groups, ctx.how.casts.config
        for_input, for_weight = ctx.for_input, x8 is not None
        layouts = {"plain": for_input, "transposed": for_weight}
        if how.sums is None:
            dy = how.casts.quantize(OUTPUT_GRADIENT, gradient, **layouts, dtype=E4M3)
        else:
            dy = how.casts.quantize(OUTPUT_GRADIENT, _not_empty(gradient), dtype=E4M3)
            data, transpose = _laid_out(dy.data, how.sums, **layouts)
            dy = dy._replace(data=data, transpose=transpose)
        dx: torch.Tensor | None = None
        arrives: Callable[[], torch.Tensor] | None = None
        dw: Sequence[torch.Tensor | None] = (None,) * len(ctx.shapes)
        if for_input:
            if how.backward_weight is not None:
                # its scale too: where an engine gathers again, forward's may be another's by now
                w8, scale = how.backward_weight()
                w_inverse_scales = scale.view(1, 1) if scale.dim() == 0 else scale
            elif ctx.late:
                w8 = transposed(w8)
            transposes = _by_expert(w8, len(groups.ends), ctx.is_transposed)
            options = _options(config, "dgrad", transposes.shape[2] // w_inverse_scales.shape[1])
            dx = _dgrad(dy, transposes, w_inverse_scales, groups, options)
            if how.reads is not None:
                dx = sum_rows(dx, how.reads.places)
            if how.send_back is not None:
                arrives, dx = how.send_back(dx), None  # on its way while the weights' gradients are computed
        if for_weight:
            if how.reads is not None:
                _, x8 = _laid_out(x8, how.reads, plain=False, transposed=True)
            outputs, inputs = (dy.transpose, dy.inverse_scale), (x8, x_inverse_scale)
            (rows, scale_of_rows), (columns, scale) = (inputs, outputs) if ctx.is_transposed else (outputs, inputs)
            options = _options(config, "wgrad", UNEVEN * how.filled_rows // len(groups.ends))
            options = {"factor": how.weight_gradient_factor, **options}
            wgrad = functools.partial(_wgrad, groups.rows, ctx.shapes, ctx.dtype, options)
            given = rows, columns, scale_of_rows, scale, groups.ends
            follow = Copies.follow if ctx.given_on and copies_held(rows) else None
            dw = wgrad(*given) if follow is None else follow(wgrad, given, ctx.shapes, ctx.dtype)
        return dx if arrives is None else arrives(), *(None,) * 3, *dw


_apply = applied_directly(_GroupedLinear)


def _options(config: FP8Config, name: str, length: int) -> dict[str, bool]:
    """Return the options of a product in backward whose sums are so long."""
    options = config.product_options
    fast = options["fprop"]["fast_accumulation"] and length <= FAST_SUM
    return {**options[name], "fast_accumulation": True} if fast else options[name]


def _wgrad(
    count: int,  # of rows
    shapes: Sequence[torch.Size],
    dtype: torch.dtype,
    options: dict[str, Any],
    a: torch.Tensor,
    b: torch.Tensor,
    inverse_scale_a: torch.Tensor,
    inverse_scale_b: torch.Tensor,
    ends: torch.Tensor,
) -> Sequence[torch.Tensor]:
    whole = summed_product(a, b, inverse_scale_a, inverse_scale_b, Groups(count, ends), **options).to(dtype)
    return whole.view(len(shapes), *shapes[0]).unbind(0)  # in one call, for there may be hundreds


def _dgrad(
    dy: QuantizedMatrix,
    transposes: torch.Tensor,  # [G, K, N]
    inverse_scales: torch.Tensor,  # [G, P] or [1, 1]
    groups: Groups,
    options: dict[str, bool],
) -> torch.Tensor:  # [M, K]
    layers = inverse_scales.shape[1]
    # scales multiply what is summed already, so each layer with a scale of its own is a sum of its own
    by_layer = transposes.unflatten(2, (layers, -1))
    gradients = dy.data.view(len(dy.data), layers, -1)
    by_products = (
        grouped_product(
            gradients[:, layer],
            by_layer[:, :, layer],
            dy.inverse_scale,
            inverse_scales[:, layer].contiguous(),
            groups,
            **options,
        )
        for layer in range(layers)
    )
    return functools.reduce(torch.Tensor.add_, by_products)

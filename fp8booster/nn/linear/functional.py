"""A linear layer's three products in FP8, as one differentiable function of plain tensors.

Shape legend: M tokens, K input features, N output features; a trailing 16 marks a size rounded up to a multiple of 16.

    fprop  y  = x @ w.T     [M, K] by [N, K]
    dgrad  dx = dy @ w      [M, N] by [K, N]: reads the transpose of w
    wgrad  dw = dy.T @ x    [N, M] by [K, M]: reads the transposes of dy and x

Hopper multiplies only rows by rows, so each operand is cast into the layouts that its products read. Between forward
and backward live the FP8 transposes of x and w: one byte a value. A recipe that came with x stands in for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import function
from torch.distributed.tensor import DTensor

from fp8booster import formats
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.product import product
from fp8booster.nn.linear.exchange import Exchange
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import Recipe
from fp8booster.nn.weights.pinned import Copies
from fp8booster.nn.weights.source import BackwardWeight, transposed_in_backward
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix

DEFAULT_CONFIG = FP8Config()

Defer = Callable[[Callable[[], torch.Tensor]], None]
"""Takes what computes a weight's gradient, to call it once, later, and add what it returns to the gradient."""


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a backward as torch's `once_differentiable`, without its work where nobody asks for gradients of gradients.

    Who asks for them gets an error also where the gradient that arrives is a constant, for which torch's passes what
    it gives off as one: it depends on what was saved.

    Args:
        backward: of a `torch.autograd.Function`.
    """
    checked = function.once_differentiable(backward)

    @wraps(backward)
    def wrapper(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        if not torch.compiler.is_compiling():
            gradients = tuple(each if each is None else each.detach().requires_grad_() for each in gradients)
        return checked(ctx, *gradients)

    return wrapper


def applied_directly(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return what applies a function of autograd, for callers that `torch.compile` does not see.

    `Function.apply` looks in Python for wrappers of `torch.func` around each argument, of which experts have hundreds.
    """
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def apply(*arguments: Any) -> Any:
        within_func = torch._C._functorch.peek_interpreter_stack() is not None
        return function.apply(*arguments) if within_func else direct(*arguments)

    return apply


Map = Callable[[torch.Tensor], torch.Tensor]


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
        ctx.carry_back = backward
        return forward(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return ctx.carry_back(gradient), None, None


def linear_map(tensor: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """Return `forward(tensor)`, differentiable.

    Args:
        tensor: of any shape.
        forward: linear; gives another tensor object, of any shape.
        backward: its transpose: of the gradient of what `forward` gives, that of the tensor. Neither may hold tensors
            that need gradients.
    """
    return _LinearMap.apply(tensor, forward, backward)


@dataclass(eq=False)  # not frozen: such a one takes longer to make
class _Call:
    """The operands and options of one call."""

    operands: tuple[QuantizedMatrix, ...]
    """Of fprop: x, [M16, K16], and w, [N16, K16]; none behind it, for backward finds what autograd saved."""

    weights: int
    """How many there are, stacked by rows."""

    out_dtype: torch.dtype
    casts: Casts
    """Of the layer, with its configuration."""

    defer: Defer | None
    exchange: Exchange | None
    weight_is_transposed: bool
    backward_weight: BackwardWeight | None
    recipe: Recipe | None
    """What makes x again; None: backward finds its FP8 transpose."""

    row_scales: torch.Tensor | None
    """[N, ...]: what backward multiplies the output's gradient by before its cast, for a transpose made of rows with a
    scale each; None: nothing."""


class _Linear(torch.autograd.Function):
    """y = x @ w.T + bias from FP8 copies of x and w; gradients go to the high-precision x, weights and bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,  # [..., K], M rows in all
        bias: torch.Tensor | None,  # [N]
        how: _Call,
        *tensors: torch.Tensor,  # weights of N rows in all, [N, K], or [K, N] where it is transposed; `Recipe.saved`
    ) -> torch.Tensor:  # [..., N]
        weights, source = tensors[: how.weights], tensors[how.weights :]
        x, w = how.operands
        how.operands = ()  # else `ctx` would keep both layouts of both until backward
        for_input = ctx.needs_input_grad[0]
        save_w = for_input and how.backward_weight is None
        saved_w = _transpose(w) if save_w else (None, None)
        if not source and any(ctx.needs_input_grad[_WEIGHTS : _WEIGHTS + how.weights]):
            source = _transpose(x)
        ctx.save_for_backward(*saved_w, *source)
        weight = weights[0]
        ctx.how, ctx.input_dtype, ctx.weight_dtype = how, input.dtype, weight.dtype
        ctx.rows = [weight.shape[0] for weight in weights]
        ctx.weight_shape = (sum(ctx.rows), weight.shape[1])
        ctx.bias_dtype = None if bias is None else bias.dtype
        outputs = ctx.weight_shape[1 if how.weight_is_transposed else 0]
        ctx.shape = input.shape if how.exchange is None else how.exchange.shape(input.shape)
        return fprop(x, w, bias, outputs, ctx.shape, how.out_dtype, how.casts.config, how.exchange)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # [..., N]
        w_transpose, w_scale, *source = ctx.saved_tensors
        how, config = ctx.how, ctx.how.casts.config
        for_input, for_bias = ctx.needs_input_grad[:2]
        for_weight = any(ctx.needs_input_grad[_WEIGHTS : _WEIGHTS + how.weights])
        dx = db = None
        dws: tuple[torch.Tensor | None, ...] = (None,) * how.weights
        if for_input or for_weight:
            of_product = gradient  # the bias, which no scale multiplies, gets the one that arrived
            if how.row_scales is not None:  # in FP32: FP16 would lose the product's small values
                of_product = gradient.float() * how.row_scales[: gradient.shape[-1]]
            layouts = {"plain": for_input, "transposed": for_weight}
            if how.exchange is None:
                dy = how.casts.quantize(OUTPUT_GRADIENT, of_product, **layouts)
            else:
                dy = how.exchange.output_gradient(of_product, how.casts, **layouts)
        if for_input:
            if how.backward_weight is not None:
                w_transpose, w_scale = how.backward_weight()
            dx = product(
                dy.data,
                w_transpose,
                dy.inverse_scale,
                w_scale,
                out_dtype=ctx.input_dtype,
                **config.product_options["dgrad"],
                shape=(prod(ctx.shape[:-1]), ctx.shape[-1]),
            )
            dx = dx.view(ctx.shape)
            # begun before wgrad, which hides it
            dx_arrives = None if how.exchange is None else how.exchange.input_gradient(dx)
        if for_weight:
            x_transpose, x_scale = source if how.recipe is None else _recomputed(how.recipe, source, how.casts)
            dy_transpose, dy_scale = _transpose(dy)
            matrices, scales = (dy_transpose, x_transpose), (dy_scale, x_scale)
            if how.weight_is_transposed:
                matrices, scales = matrices[::-1], scales[::-1]
            place_of = Copies.gradient_place
            wgrad = partial(
                product,
                *matrices,
                *scales,
                out_dtype=ctx.weight_dtype,
                **config.product_options["wgrad"],
                shape=ctx.weight_shape,
                out=None if place_of is None else place_of(ctx.weight_shape, ctx.weight_dtype),
            )
            # a deferred gradient reaches its parameter past autograd, which gets none for it
            if how.defer is not None:
                how.defer(wgrad)
            else:
                dws = (wgrad(),) if how.weights == 1 else wgrad().split_with_sizes(ctx.rows)
        if for_bias:
            # in FP32: a 16-bit sum over thousands of tokens loses what each adds
            db = gradient.reshape(-1, gradient.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if for_input and dx_arrives is not None:
            dx = dx_arrives()
        return dx, db, None, *dws, *(None,) * (len(ctx.needs_input_grad) - _WEIGHTS - how.weights)


def fprop(
    x: QuantizedMatrix,
    w: QuantizedMatrix,
    bias: torch.Tensor | None,
    outputs: int,
    shape: tuple[int, ...],
    out_dtype: torch.dtype,
    config: FP8Config,
    exchange: Exchange | None = None,
) -> torch.Tensor:
    """Return the product x @ w.T + bias, [..., outputs]; `shape` is the input's, [..., K], as the product reads it."""
    if bias is not None:
        # the product has the columns that fill up to 16 too, and adds a bias to each
        bias = F.pad(bias.detach().to(out_dtype), (0, w.data.shape[0] - outputs))
    y = product(
        x.data,
        w.data,
        x.inverse_scale,
        w.inverse_scale,
        out_dtype=out_dtype,
        bias=bias,
        **config.product_options["fprop"],
        shape=(prod(shape[:-1]), outputs),
    )
    y = unsafe_view(y, (*shape[:-1], outputs))
    return y if exchange is None else exchange.output(y)


def _transpose(matrix: QuantizedMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix's transpose and its inverse scale."""
    scale = matrix.transpose_inverse_scale
    return matrix.transpose, matrix.inverse_scale if scale is None else scale


_WEIGHTS = 3
"""Where the weights begin among the arguments of `_Linear`."""


def _recomputed(recipe: Recipe, source: list[torch.Tensor], casts: Casts) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the FP8 transpose of x again, and its inverse scale."""
    if recipe.transpose is not None and casts.inputs_have_their_own_scale:
        return recipe.transpose(*source, dtype=casts.config.input_format, power_of_two=casts.scaling.power_of_two)
    matrix, amax = recipe.matrix(*source)
    x = casts.quantize(INPUT, matrix, plain=False, transposed=True, amax=amax)
    return _transpose(x)


def unsafe_view(made: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor just made, which nothing else holds, in a shape of the same size, and no view for autograd.

    torch refuses to change a view in place that a custom function gave, as `nn.ReLU(inplace=True)` does after a layer.
    """
    return torch.ops.aten._unsafe_view.default(made, shape)


def unaliased(product: torch.Tensor) -> torch.Tensor:
    """A product that was just computed, to be written over; a copy of it where someone else may hold it.

    Selective checkpointing keeps what operators gave for its recomputation, by a dispatch mode, and does not see all
    that is written over it.
    """
    held = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    return product.clone() if held else product


def output_dtype(input: torch.Tensor) -> torch.dtype:
    """Return the dtype of what a linear layer makes of an input: autocast's, or the input's."""
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype


def check_operands(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check what F.linear would check, and what FP8 needs besides.

    Raises:
        ValueError: sizes that do not fit together.
        TypeError: dtypes that cannot be cast to FP8, or that differ outside autocast; a DTensor.
        RuntimeError: inside a transform of `torch.func`.
    """
    if not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(
            "torch.func's transforms (grad, vjp, vmap, jvp, jacrev, ...) do not go through FP8 products; call "
            "torch.autograd.grad, or transform a model that was not converted to FP8"
        )
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; give a matrix of [output features, input features]")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}; the last size of both must be the "
            "number of input features"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; give {weight.shape[0]} values, one for each output feature"
        )
    for tensor, what in ((input, "input"), (weight, "weight"), (bias, "bias")):
        if isinstance(tensor, DTensor):  # kernels would read at the address 0
            raise TypeError(
                f"{what} is a DTensor, as parallelize_module makes it, and FP8 kernels take whole tensors; leave the "
                "layer out with FP8Config(layers=...), or shard the model with HybridParallelPlugin"
            )
        if tensor is not None and tensor.dtype not in formats.HIGH_PRECISION:
            formats.require_high_precision(tensor, what)
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        raise TypeError(
            f"input is {input.dtype} and weight is {weight.dtype}; cast one to the other's dtype or run under "
            "torch.autocast"
        )


def linear_from_quantized(
    input: torch.Tensor,
    weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    x: QuantizedMatrix,
    w: QuantizedMatrix,
    casts: Casts,
    *,
    defer: Defer | None = None,
    exchange: Exchange | None = None,
    weight_is_transposed: bool = False,
    backward_weight: BackwardWeight | None = None,
    recipe: Recipe | None = None,
) -> torch.Tensor:
    """The linear layer, its input and weight already cast.

    Args:
        input: [..., K], not empty; receives the input's gradient.
        weight: [N, K], or several that are stacked by rows; receives the weight's gradient.
        bias: [N] or None.
        x: the input as a matrix of K columns, with its transpose if the weight needs a gradient and there is no recipe.
        w: the weight, with or without its transpose.
        casts: the layer's; they cast the output's gradient.
        defer: backward gives it what computes the weight's gradient from the FP8 transposes of x and dy, and autograd
            none; until that is called it holds the two. None computes the gradient in backward.
        exchange: what ranks exchange around the products; its `input` made x. None: nothing.
        weight_is_transposed: the weight, and so its gradient, lies as [K, N]; w is a matrix of [N, K] all the same.
        backward_weight: backward asks it for the weight's transpose, and holds none itself; None keeps that of `w`, or
            makes it in backward where `w` has none, with rowwise scales for a weight without a gradient.
        recipe: backward makes the input's transpose by it, and holds none itself.

    Returns:
        [..., N] of the input's dtype, or of autocast's.

    Raises:
        TypeError: torch.jit.trace runs it.
    """
    if torch._C._get_tracing_state() is not None:  # scales and FP8 weights would be constants of the trace
        raise TypeError(
            "torch.jit.trace, also within torch.onnx, records no FP8 products; use torch.compile or torch.export, or "
            "trace the model before it is converted"
        )
    # as `output_dtype`, without a call, for which the GPU of a small model waits
    device = input.device.type
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
    weights = (weight,) if isinstance(weight, torch.Tensor) else weight
    if not torch.is_grad_enabled():  # without autograd's function, whose Python a decode of few tokens waits for
        outputs = weights[0].shape[1] if weight_is_transposed else sum(each.shape[0] for each in weights)
        shape = input.shape if exchange is None else exchange.shape(input.shape)
        return fprop(x, w, bias, outputs, shape, out_dtype, casts.config, exchange)
    wants_transpose = backward_weight is None and input.requires_grad
    row_scales = None
    if wants_transpose and not w.transpose.numel():
        backward_weight = transposed_in_backward(w)
        row_scales = w.inverse_scale if w.has_row_scales else None
    how = _Call(
        (x, w),
        len(weights),
        out_dtype,
        casts,
        defer,
        exchange,
        weight_is_transposed,
        backward_weight,
        None if recipe is None else recipe.without_saved(),
        row_scales,
    )
    return _Linear.apply(input, bias, how, *weights, *(() if recipe is None else recipe.saved))


def fp8_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, config: FP8Config | None = None
) -> torch.Tensor:
    """`torch.nn.functional.linear` with its three products in FP8, scales computed from the tensors as they are now.

    Sizes that are no multiple of 16 are padded with zeros for the products. An empty batch, or a weight of no
    output features, gives an empty result. To cast a weight once per optimizer step rather than at every call, use
    `FP8Linear`.

    Args:
        input: [..., K], BF16, FP16 or FP32, one dimension or more.
        weight: [N, K], of the input's dtype, or any of the three under autocast.
        bias: [N] or None.
        config: formats and accumulation; None is `FP8Config()`. Its `layers` is not read.

    Returns:
        [..., N] of the input's dtype, or of autocast's.

    Raises:
        ValueError: sizes that do not fit together, or a GPU without FP8 products while `config.emulate` is off.
        TypeError: another dtype, or dtypes that differ outside autocast; a DTensor.
        RuntimeError: inside a transform of `torch.func`.
    """
    config = DEFAULT_CONFIG if config is None else config
    check_operands(input, weight, bias)
    require_fp8(input.device, config.emulate, config.granularity)
    if input.numel() == 0 or weight.numel() == 0:  # there is nothing to cast, in forward or in backward
        return F.linear(input, weight, bias)
    gradients = torch.is_grad_enabled()
    casts = Casts(config)
    x = casts.quantize(INPUT, input, transposed=gradients and weight.requires_grad)
    w = casts.quantize_weight(weight, transposed=gradients and input.requires_grad)
    return linear_from_quantized(input, weight, bias, x, w, casts)

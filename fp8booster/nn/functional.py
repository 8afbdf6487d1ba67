"""A linear layer's three products in FP8, as one differentiable function of plain tensors.

Shape legend: M tokens, K input features, N output features; a trailing 16 marks a size rounded up to a multiple of 16.

    fprop  y  = x @ w.T     [M, K] by [N, K]
    dgrad  dx = dy @ w      [M, N] by [K, N]: reads the transpose of w
    wgrad  dw = dy.T @ x    [N, M] by [K, M]: reads the transposes of dy and x

Hopper multiplies only rows by rows, so each operand is cast into the layouts that its products read. Between forward
and backward live the FP8 transposes of x and w: one byte a value.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fp8booster import formats
from fp8booster.config import FP8Config
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.product import product
from fp8booster.tensor import QuantizedMatrix, quantize

DEFAULT_CONFIG = FP8Config()


class _Linear(torch.autograd.Function):
    """y = x @ w.T + bias from FP8 copies of x and w; gradients go to the high-precision x, w and bias."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        input: torch.Tensor,  # [..., K], M rows in all
        weight: torch.Tensor,  # [N, K]
        bias: torch.Tensor | None,  # [N]
        x8: torch.Tensor,  # [M16, K16]
        x8_transpose: torch.Tensor,  # [K16, M16]
        x_inverse_scale: torch.Tensor,
        x_transpose_inverse_scale: torch.Tensor | None,
        w8: torch.Tensor,  # [N16, K16]
        w8_transpose: torch.Tensor,  # [K16, N16]
        w_inverse_scale: torch.Tensor,
        w_transpose_inverse_scale: torch.Tensor | None,
        out_dtype: torch.dtype,
        config: FP8Config,
        gradient_amax: torch.Tensor | None,
    ) -> torch.Tensor:  # [..., N]
        x = QuantizedMatrix(x8, x8_transpose, x_inverse_scale, x_transpose_inverse_scale)
        w = QuantizedMatrix(w8, w8_transpose, w_inverse_scale, w_transpose_inverse_scale)
        for_input, for_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(
            x.transpose if for_weight else None,
            x.scale_of_transpose() if for_weight else None,
            w.transpose if for_input else None,
            w.scale_of_transpose() if for_input else None,
        )
        ctx.config, ctx.gradient_amax = config, gradient_amax
        ctx.input_shape, ctx.input_dtype, ctx.weight_dtype = input.shape, input.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        outputs, inputs = weight.shape
        rows = input.numel() // inputs
        if bias is not None:
            bias = F.pad(bias.detach().to(out_dtype), (0, w.data.shape[0] - outputs))
        y = product(
            x.data,
            w.data,
            x.inverse_scale,
            w.inverse_scale,
            out_dtype=out_dtype,
            bias=bias,
            fast_accumulation=config.fast_accumulation_fprop,
            emulate=config.emulate,
        )
        return _crop(y, rows, outputs).view(*input.shape[:-1], outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:  # [..., N]
        x8_transpose, x_inverse_scale, w8_transpose, w_inverse_scale = ctx.saved_tensors
        config = ctx.config
        gradient = gradient.reshape(-1, gradient.shape[-1])
        (rows, outputs), inputs = gradient.shape, ctx.input_shape[-1]
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if for_input or for_weight:
            dy = quantize(
                gradient,
                config.gradient_format,
                plain=for_input,
                transposed=for_weight,
                rowwise=config.rowwise,
                power_of_two=config.power_of_two,
                amax=ctx.gradient_amax,
            )
        if for_input:
            dx = product(
                dy.data,
                w8_transpose,
                dy.inverse_scale,
                w_inverse_scale,
                out_dtype=ctx.input_dtype,
                fast_accumulation=config.fast_accumulation_dgrad,
                emulate=config.emulate,
            )
            dx = _crop(dx, rows, inputs).view(ctx.input_shape)
        if for_weight:
            dw = product(
                dy.transpose,
                x8_transpose,
                dy.scale_of_transpose(),
                x_inverse_scale,
                out_dtype=ctx.weight_dtype,
                fast_accumulation=config.fast_accumulation_wgrad,
                emulate=config.emulate,
            )
            dw = _crop(dw, outputs, inputs)
        if for_bias:
            db = gradient.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, *(None,) * 11


def _crop(padded: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The first rows and columns, contiguous as callers of F.linear expect it."""
    return padded if padded.shape == (rows, columns) else padded[:rows, :columns].contiguous()


def check_operands(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Check what F.linear would check, and what FP8 needs beside it.

    Raises:
        ValueError: sizes that do not fit together.
        TypeError: dtypes that cannot be cast to FP8, or that differ outside autocast.
    """
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}; give a matrix of [output features, input features]"
        )
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)} and weight {tuple(weight.shape)}; the last size of both must be the "
            "number of input features"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; give {weight.shape[0]} values, one for each output feature"
        )
    formats.require_high_precision(input, "input")
    formats.require_high_precision(weight, "weight")
    if bias is not None:
        formats.require_high_precision(bias, "bias")
    if input.dtype != weight.dtype and not torch.is_autocast_enabled(input.device.type):
        raise TypeError(
            f"input is {input.dtype} and weight is {weight.dtype}; cast one to the other's dtype or run under "
            "torch.autocast"
        )


def linear_from_quantized(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    x: QuantizedMatrix,
    w: QuantizedMatrix,
    config: FP8Config,
    gradient_amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """The linear layer, its input and weight already cast.

    Args:
        input: [..., K], not empty; receives the input's gradient.
        weight: [N, K]; receives the weight's gradient.
        bias: [N] or None.
        x: the input as a matrix of K columns, with its transpose if the weight needs a gradient.
        w: the weight, with its transpose if the input needs a gradient.
        config: accumulation and the gradient's format.
        gradient_amax: float32, whose largest entry is the amax of the output's gradient by the time backward reads it;
            what makes the gradient fills it. None computes it there. For tensorwise scales.

    Returns:
        [..., N] of the input's dtype, or of autocast's.
    """
    device = input.device.type
    out_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype
    return _Linear.apply(input, weight, bias, *x, *w, out_dtype, config, gradient_amax)


def fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: FP8Config | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear` with its three products in FP8, scales computed from the tensors as they are now.

    Sizes that are no multiple of 16 are padded with zeros for the products. An empty batch gives an empty result. To
    cast a weight once per optimizer step rather than at every call, use `FP8Linear`.

    Args:
        input: [..., K], BF16, FP16 or FP32, one dimension or more.
        weight: [N, K], of the input's dtype, or any of the three under autocast.
        bias: [N] or None.
        config: formats and accumulation; None is `FP8Config()`. Its `layers` is not read.

    Returns:
        [..., N] of the input's dtype, or of autocast's.

    Raises:
        ValueError: sizes that do not fit together, or a GPU without FP8 products while `config.emulate` is off.
        TypeError: another dtype, or dtypes that differ outside autocast.
    """
    config = DEFAULT_CONFIG if config is None else config
    check_operands(input, weight, bias)
    require_fp8(input.device, config.emulate)
    if input.numel() == 0:
        return F.linear(input, weight, bias)
    gradients = torch.is_grad_enabled()
    x = quantize_input(input, config, transposed=gradients and weight.requires_grad)
    w = quantize_weight(weight, config, transposed=gradients and input.requires_grad)
    return linear_from_quantized(input, weight, bias, x, w, config)


def quantize_input(
    input: torch.Tensor, config: FP8Config, *, transposed: bool, amax: torch.Tensor | None = None
) -> QuantizedMatrix:
    """Cast a layer's input, [..., K], as a matrix of K columns; what made it may know its amax."""
    matrix = input.detach().reshape(-1, input.shape[-1])
    return quantize(
        matrix,
        config.input_format,
        transposed=transposed,
        rowwise=config.rowwise,
        power_of_two=config.power_of_two,
        amax=amax,
    )


def quantize_weight(weight: torch.Tensor, config: FP8Config, *, transposed: bool) -> QuantizedMatrix:
    """Cast a layer's weight, [N, K]."""
    return quantize(
        weight.detach(),
        config.weight_format,
        transposed=transposed,
        rowwise=config.rowwise,
        power_of_two=config.power_of_two,
    )

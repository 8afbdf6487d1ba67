"""The FP8 product of operands with blockwise scales: one place calls `torch.nn.functional.scaled_mm`."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from fp8booster.kernels.blockwise_cast import are_groups, decoded


def blockwise_product(
    a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor, *, out_dtype: torch.dtype, emulate: bool
) -> Tensor:
    """`decoded(a) @ decoded(b).T`, summed in FP32.

    On a Hopper GPU cuBLAS applies the scales to the sums of 128 products each, which it adds in FP32: there is no fast
    accumulation. The CPU has no such product: it decodes the operands and multiplies in FP32, as `emulate` does.

    Args:
        a: [M, K] E4M3, contiguous, with a scale for each group of 128 values of a row.
        b: [N, K] E4M3, contiguous, with a scale for each group, or for each block of 128 x 128.
        inverse_scale_a, inverse_scale_b: as `kernels.blockwise_cast.blockwise_cast` gives them.
        out_dtype: BF16, FP16 or FP32.
        emulate: decode the operands on a GPU too.

    Returns:
        [M, N] of out_dtype. M, N and K are multiples of 128.
    """
    if emulate or a.is_cpu:
        off = torch.is_autocast_enabled(a.device.type)
        with torch.autocast(a.device.type, enabled=False) if off else contextlib.nullcontext():
            return (decoded(a, inverse_scale_a) @ decoded(b, inverse_scale_b).t()).to(out_dtype)
    # the products come in BF16 and FP32
    product_dtype = torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32
    if torch.compiler.is_compiling():
        return multiply_blockwise(a, b, inverse_scale_a, inverse_scale_b, product_dtype).to(out_dtype)
    return _multiply(a, b, inverse_scale_a, inverse_scale_b, product_dtype).to(out_dtype)


def _multiply(a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    return scaled_mm(
        a,
        b.t(),
        inverse_scale_a.t(),
        ScalingType.BlockWise1x128,
        inverse_scale_b.t(),
        ScalingType.BlockWise1x128 if are_groups(b, inverse_scale_b) else ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


multiply_blockwise = torch.library.custom_op("fp8booster::multiply_blockwise", _multiply, mutates_args=())
"""What compiled code sees whole: not each version of torch's compiler knows this product."""


@multiply_blockwise.register_fake
def _(a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)

"""The FP8 product: one place calls `torch._scaled_mm`, and one `scaled_mm`, for blockwise scales."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp8booster import formats
from fp8booster.kernels.blockwise_cast import are_groups, decoded
from fp8booster.kernels.operators import without_autocast
from fp8booster.kernels.scales import SCALE_STRIDE


def product(
    a: Tensor,
    b: Tensor,
    inverse_scale_a: Tensor,
    inverse_scale_b: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    fast_accumulation: bool = False,
    emulate: bool = False,
    shape: tuple[int, int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return `(a @ b.T) * inverse_scale_a[:, None] * inverse_scale_b + bias`, summed in FP32 or as the hardware does.

    Args:
        a: [M, K] FP8, contiguous.
        b: [N, K] FP8, contiguous: the layout in which Hopper reads its second operand.
        inverse_scale_a, inverse_scale_b: float32, of shape [], or [M] and [N], copied where they begin at no
            multiple of 16 bytes of their memory; or both of two dimensions, as in `blockwise_product`.
        out_dtype: BF16, FP16 or FP32.
        bias: [N] of out_dtype.
        fast_accumulation: do not promote partial sums to FP32 on the way; blockwise scales need that they are.
        emulate: multiply in FP32 instead; so does a CPU where PyTorch's kernel for it takes one scale alone.
        shape: give so many of the first rows and columns, contiguous as callers of F.linear expect it.
        out: [M, N] of out_dtype, memory for what is returned; it is left alone where no kernel writes there.

    Returns:
        [M, N] of out_dtype, or what `shape` says. M, N and K are multiples of 16, and of 128 with blockwise scales.
    """
    if inverse_scale_a.dim() == 2:
        dtype = out_dtype if bias is None else torch.float32  # which the sum with the bias is rounded from, once
        result = blockwise_product(a, b, inverse_scale_a, inverse_scale_b, out_dtype=dtype, emulate=emulate)
        result = result if bias is None else (result + bias).to(out_dtype)
        return result if shape is None or result.shape == shape else _cropped(result, *shape)
    rowwise, is_cuda = inverse_scale_a.dim() + inverse_scale_b.dim() > 0, a.is_cuda
    if rowwise:  # a scale for each row of both operands: the kernel takes no mixture
        inverse_scale_a = inverse_scale_a.expand(len(a)).contiguous()
        inverse_scale_b = inverse_scale_b.expand(len(b)).contiguous()
    if (
        fast_accumulation
        and is_cuda
        and not rowwise
        and out_dtype is torch.bfloat16
        and 2.0 * a.shape[0] * b.shape[0] * a.shape[1] >= LARGE_PRODUCT
        and _is_faster_by_rows(a.device)
    ):
        inverse_scale_a, inverse_scale_b = _repeated(inverse_scale_a, a), _repeated(inverse_scale_b, b)
        rowwise = True
    if rowwise:
        inverse_scale_a, inverse_scale_b = inverse_scale_a.view(-1, 1), inverse_scale_b.view(1, -1)
    emulate = emulate or (rowwise and a.is_cpu and not _cpu_multiplies_by_rows())
    # compiled code makes the scales that it reads, each by itself, and cannot ask where they lie
    if is_cuda and not torch.compiler.is_compiling():
        if inverse_scale_a.storage_offset() % SCALE_STRIDE:
            inverse_scale_a = inverse_scale_a.clone()
        if inverse_scale_b.storage_offset() % SCALE_STRIDE:
            inverse_scale_b = inverse_scale_b.clone()
    if emulate:
        with without_autocast(a.device.type):
            # in FP64: a sum times one of the scales may be infinite in FP32 where the result is not
            exact = ((a.float() @ b.float().t()).double() * inverse_scale_a * inverse_scale_b).float()
        result = (exact if bias is None else exact + bias).to(out_dtype)
        return result if shape is None else _cropped(result, *shape)
    # on CUDA rowwise products come in BF16 alone, and a bias is added only to 16-bit results
    product_dtype = torch.bfloat16 if rowwise and is_cuda else out_dtype
    epilogue = bias if bias is not None and bias.dtype is product_dtype is not torch.float32 else None
    fits = out is not None and out.dtype is product_dtype and out.shape == (len(a), len(b))
    multiply = _scaled_mm_on_cpu if a.is_cpu else torch._scaled_mm
    result = multiply(
        a,
        b.t(),  # a view in columns: no copy, and the only layout that cuBLAS takes
        scale_a=inverse_scale_a,
        scale_b=inverse_scale_b,
        bias=epilogue,
        out_dtype=product_dtype,
        use_fast_accum=fast_accumulation,
        **({"out": out} if fits else {}),
    )
    # a BF16 result and an FP16 bias are added in FP32: what the bias brings back into FP16's range stays finite
    result = (result if bias is epilogue else result + bias).to(out_dtype)
    return result if shape is None or result.shape == shape else _cropped(result, *shape)


def _cropped(result: Tensor, rows: int, columns: int) -> Tensor:
    # a copy: a view would keep the padding alive, and callers of F.linear expect contiguous memory
    return result[:rows, :columns].contiguous()


# operations of a product from which on Hopper's kernel for one scale a row pays, its vectors of scales included
LARGE_PRODUCT = 2e11


def _is_faster_by_rows(device: torch.device) -> bool:
    """Tell whether a large product with fast accumulation is faster if each row is given the tensor's scale."""
    # cuBLAS takes another kernel for it, whose sums have as few bits. With it fast products of an H200 are 6 % faster
    # than exact ones in the median over the fprops in benchmarks/results/h200/gemm (from 1 % slower to 10 %), where
    # power limits both; with the kernel for one scale they were no faster (gemm-one-scale). By it a step of 13B takes
    # 1 % less (llama-13b-4-rows).
    return (_capability if torch.compiler.is_compiling() else _known_capability)(device) == (9, 0)


def _repeated(scale: Tensor, operand: Tensor) -> Tensor:
    """Return the scale once for each row of an operand."""
    rows, device = len(operand), operand.device
    # memory that is allocated during a capture belongs to its graph
    if torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return _ones(rows, device) * scale
    # of each stream its own: another may read before they are written, or after the cache has given them up
    return _known_ones(rows, device, torch.cuda.current_stream(device).cuda_stream) * scale


def _ones(count: int, device: torch.device, stream: int | None = None) -> Tensor:
    return torch.ones(count, dtype=torch.float32, device=device)


_known_ones = functools.lru_cache(maxsize=64)(_ones)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


_known_capability = functools.cache(_capability)


def _scaled_mm_on_cpu(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    """Call `torch._scaled_mm` on operands that decode to finite values, in PyTorch's own kernel, without autocast."""
    if torch.compiler.is_compiling():
        return multiply_on_cpu(a, b, scale_a, scale_b, options["bias"], options["out_dtype"])
    scale_a, scale_b = _decodable(a, b, scale_a, scale_b)
    with torch.autocast("cpu", enabled=False), _without_onednn():
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, **options)


@functools.partial(torch.library.custom_op, "fp8booster::multiply_on_cpu", mutates_args=())
def multiply_on_cpu(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply as `_scaled_mm_on_cpu`; compiled code sees it whole, for it would leave the product to oneDNN."""
    return _scaled_mm_on_cpu(a, b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=dtype)


@multiply_on_cpu.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype)


def _decodable(a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales that give the same product, by which both operands decode to finite values."""
    # The CPU's kernels decode the operands, then multiply. Under a power of two a value next to FP32's largest, rounded
    # up to FP8, decodes to 2**128, which is infinite. So such an operand is halved, and the other doubled: both exact.
    large_a, large_b = (
        (scale * formats.MAX[operand.dtype] >= 2.0**126).any()
        for operand, scale in ((a, inverse_scale_a), (b, inverse_scale_b))
    )
    factor = (1 + large_b.float()) / (1 + large_a.float())
    return inverse_scale_a * factor, inverse_scale_b / factor


@torch.compiler.assume_constant_result
@functools.cache
def _cpu_multiplies_by_rows() -> bool:
    """Tell whether PyTorch's own kernel for the CPU takes a scale for each row: torch 2.11's does not, 2.13's does."""
    operand = torch.zeros(16, 16, dtype=formats.E4M3, device="cpu")
    scale = torch.ones(16, 1, dtype=torch.float32, device="cpu")
    with _disable_current_modes():  # whoever counts products does not mean this one
        try:
            _scaled_mm_on_cpu(operand, operand.t(), scale_a=scale, scale_b=scale.t(), out_dtype=torch.bfloat16)
        except RuntimeError:
            return False
    return True


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Let PyTorch multiply FP8 on the CPU itself.

    It leaves that to oneDNN where the CPU advertises AMX. Without instructions for FP8, which few with AMX have, oneDNN
    takes 36 ms for 512 x 32 by 32 x 64, where PyTorch takes 0.14. Several scales it refuses (pytorch/pytorch#179118).
    """
    enabled = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = enabled


def blockwise_product(
    a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor, *, out_dtype: torch.dtype, emulate: bool
) -> Tensor:
    """Compute `decoded(a) @ decoded(b).T`, summed in FP32.

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
        with without_autocast(a.device.type):
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
"""`_multiply`, which compiled code sees whole: not each version of torch's compiler knows this product."""


@multiply_blockwise.register_fake
def _(a: Tensor, b: Tensor, inverse_scale_a: Tensor, inverse_scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)

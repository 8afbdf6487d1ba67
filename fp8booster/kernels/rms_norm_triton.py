"""RMS normalisation on a GPU: a row is held in registers, so every tensor is read and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.amax_partials import new_partials, processors
from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.group_codes import GROUP, GroupCodes, new_codes
from fp8booster.kernels.group_codes_triton import AT_ONCE, amax_place, decode_tile, encode_tile
from fp8booster.kernels.launch import launch
from fp8booster.kernels.rms_norm import Normalized, NormGradients

FORWARD_PROGRAMS = 8
BACKWARD_PROGRAMS = 2
"""A processor. Backward leaves one partial sum of the weight's gradient a program, so it has fewer."""


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    y,
    h,
    inverse_rms,
    partials,
    codes,  # of h, and their amaxes, where ENCODE
    amaxes,
    rows,
    columns,
    EPS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ENCODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program normalises every num_programs-th row."""
    at_once: tl.constexpr = AT_ONCE // x.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.max_contiguous((tl.zeros([1], tl.int64) + row) * columns + column, at_once)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        if RESIDUAL:
            total = values + tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
            rounded = total.to(h.dtype.element_ty)
            tl.store(h + place, rounded, mask=inside)
            values = rounded.to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / columns + EPS)
        out = (values * inverse * factors).to(y.dtype.element_ty)
        tl.store(y + place, out, mask=inside)
        tl.store(inverse_rms + row, inverse)
        largest = tl.maximum(largest, magnitude_bits(out))
        if ENCODE:
            encoded, amax = encode_tile(values, 1, BLOCK)
            tl.store(codes + place, encoded, mask=inside)
            amax_at, amax_inside = amax_place(tl.zeros([1, 1], tl.int64) + row, 0, columns, BLOCK)
            tl.store(amaxes + amax_at, amax.to(amaxes.dtype.element_ty), mask=amax_inside)
    tl.store(partials + tl.program_id(0), tl.max(largest, 0).to(tl.float32, bitcast=True))


@triton.jit
def rms_norm_backward_kernel(
    dy,
    h,  # or its codes
    amaxes,  # of the codes, where DECODE
    weight,
    inverse_rms,
    dh,
    dx,
    dweights,  # float32 [programs, columns]
    partials,
    rows,
    columns,
    RESIDUAL: tl.constexpr,
    DECODE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every num_programs-th row and sums the weight's gradient over them."""
    at_once: tl.constexpr = AT_ONCE // dy.dtype.element_ty.primitive_bitwidth
    column = tl.arange(0, BLOCK)
    inside = column < columns
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.max_contiguous((tl.zeros([1], tl.int64) + row) * columns + column, at_once)
        gradient = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.load(inverse_rms + row)
        values = tl.load(h + place, mask=inside, other=0)
        if DECODE:
            amax_at, amax_inside = amax_place(tl.zeros([1, 1], tl.int64) + row, 0, columns, BLOCK)
            values = decode_tile(values, tl.load(amaxes + amax_at, mask=amax_inside, other=0.0), 1, BLOCK)
        normal = values.to(tl.float32) * inverse
        weighted = gradient * factors
        dweight += gradient * normal
        values = inverse * (weighted - normal * (tl.sum(weighted * normal, 0) / columns))
        if RESIDUAL:
            values += tl.load(dh + place, mask=inside, other=0.0).to(tl.float32)
        out = values.to(dx.dtype.element_ty)
        tl.store(dx + place, out, mask=inside)
        largest = tl.maximum(largest, magnitude_bits(out))
    tl.store(dweights + tl.program_id(0).to(tl.int64) * columns + column, dweight, mask=inside)
    tl.store(partials + tl.program_id(0), tl.max(largest, 0).to(tl.float32, bitcast=True))


def _block(columns: int) -> dict[str, int]:
    block = max(GROUP, 1 << (columns - 1).bit_length())
    return {"num_warps": min(16, max(4, block // 512)), "BLOCK": block}


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, *, encoded: bool = False
) -> Normalized:
    """`rms_norm`, up to the order of the sum over a row."""
    rows, columns = x.shape
    programs = min(rows, FORWARD_PROGRAMS * processors(x.device))
    partials = new_partials(programs, x)
    y = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    inverse_rms = x.new_empty(rows, dtype=torch.float32)
    written = new_codes(x) if encoded else None
    launch(
        rms_norm_kernel,
        programs,
        (x, x if residual is None else residual, weight, y, h, inverse_rms, partials, *(written or (y, y))),
        (rows, columns),
        EPS=eps,
        RESIDUAL=residual is not None,
        ENCODE=encoded,
        **_block(columns),
    )
    return Normalized(y, h, inverse_rms, partials, written)


def rms_norm_backward_triton(
    dy: Tensor, h: Tensor | GroupCodes, weight: Tensor, inverse_rms: Tensor, dh: Tensor | None = None
) -> NormGradients:
    """`rms_norm_backward`, up to the order of sums."""
    rows, columns = h.shape
    programs = min(rows, BACKWARD_PROGRAMS * processors(dy.device))
    partials = new_partials(programs, dy)
    dx = torch.empty_like(dy, dtype=h.dtype)
    dweights = dy.new_empty((programs, columns), dtype=torch.float32)
    codes = h if isinstance(h, GroupCodes) else (h, h)
    launch(
        rms_norm_backward_kernel,
        programs,
        (dy, *codes, weight, inverse_rms, dy if dh is None else dh, dx, dweights, partials),
        (rows, columns),
        RESIDUAL=dh is not None,
        DECODE=isinstance(h, GroupCodes),
        **_block(columns),
    )
    return NormGradients(dx, dweights.sum(0).to(weight.dtype), partials)

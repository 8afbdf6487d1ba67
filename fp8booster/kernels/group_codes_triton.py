"""Group codes inside kernels that have a row, or part of one, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8booster.kernels.cast_triton import INFINITY_BITS, magnitude_bits
from fp8booster.kernels.group_codes import GROUP, LARGEST_SQUARE, LEAST_AMAX

WIDTH = tl.constexpr(GROUP)
AT_ONCE = tl.constexpr(128)
"""Bits of values that a thread moves at once, with as many codes. Were it 16 codes, as the compiler would have it,
values would move between threads, and a sum over a row would be added up in another order than without codes."""

_LEAST, _SQUARE, _INVERSE_SQUARE = (tl.constexpr(each) for each in (LEAST_AMAX, LARGEST_SQUARE, 1 / LARGEST_SQUARE))


@triton.jit
def encode_tile(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`encode_groups` of FP32 values, of ROWS times COLUMNS: (codes of their shape, amaxes [ROWS, COLUMNS / 128])."""
    groups = tl.reshape(values, (ROWS, COLUMNS // WIDTH, WIDTH))
    bits = tl.max(magnitude_bits(groups), 2)
    amax = bits.to(tl.float32, bitcast=True)
    usable = (amax >= _LEAST) & (bits < INFINITY_BITS)
    scale = tl.math.div_rn(tl.full((ROWS, COLUMNS // WIDTH), _SQUARE, tl.float32), tl.where(usable, amax, float("inf")))
    code = tl.floor(tl.math.sqrt_rn(tl.abs(groups) * scale[:, :, None]) + 0.5)
    code = tl.where(usable[:, :, None], tl.where(groups < 0, -code, code), 0.0)
    amax = tl.where(usable, amax, tl.where(bits < INFINITY_BITS, 0.0, float("nan")))
    return tl.reshape(code.to(tl.int8), values.shape), amax


@triton.jit
def decode_tile(codes, amaxes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`decode_groups`: FP32 values of the codes' shape; amaxes are [ROWS, COLUMNS / 128]."""
    groups = tl.reshape(codes.to(tl.float32), (ROWS, COLUMNS // WIDTH, WIDTH))
    factor = amaxes.to(tl.float32) * _INVERSE_SQUARE
    return tl.reshape(groups * tl.abs(groups) * factor[:, :, None], codes.shape)


@triton.jit
def amax_place(row, column, columns, COLUMNS: tl.constexpr):
    """(Place, mask) of the amaxes of a tile's groups, [rows, COLUMNS / 128].

    Args:
        row: int64 [rows, 1].
        column: of the tile's first value, a multiple of 128.
        columns: of the matrix.
    """
    groups = (columns + WIDTH - 1) // WIDTH
    group = column // WIDTH + tl.arange(0, COLUMNS // WIDTH)[None, :]
    return row * groups + group, group < groups

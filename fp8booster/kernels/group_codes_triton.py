"""Group codes inside kernels that have a row, or part of one, in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8booster.kernels.cast_triton import INFINITY_BITS, magnitude_bits
from fp8booster.kernels.group_codes import GROUP, HALF_ONE, LARGEST_SQUARE, LEAST_AMAX

WIDTH = tl.constexpr(GROUP)
AT_ONCE = tl.constexpr(128)
"""Bits of values that a thread moves at once, with as many codes. Were it 16 codes, as the compiler would have it,
values would move between threads, and a sum over a row would be added up in another order than without codes."""

_LEAST, _SQUARE, _INVERSE_SQUARE = (tl.constexpr(each) for each in (LEAST_AMAX, LARGEST_SQUARE, 1 / LARGEST_SQUARE))
_HALF_ONE, _SIGN = tl.constexpr(HALF_ONE), tl.constexpr(-(2**31))

_SHIFT = tl.constexpr(1.5 * 2**23)
"""A float32 whose last bit counts ones. A GPU adds floats 8 times as fast as it converts them to integers."""


@triton.jit
def to_integers(x):
    """Integers nearest to FP32 values of less than 2^22, half to even: int32, of which the low 22 bits are right."""
    return (x + _SHIFT).to(tl.int32, bitcast=True)


@triton.jit
def encode_roots(groups, AXIS: tl.constexpr):
    """`group_codes.encode_roots` of FP32 values, each group along the axis, the last: (codes as int32, amaxes)."""
    bits = tl.max(magnitude_bits(groups), AXIS)
    amax = bits.to(tl.float32, bitcast=True)
    usable = (amax >= _LEAST) & (bits < INFINITY_BITS)
    divisor = tl.where(usable, amax, float("inf"))
    scale = tl.math.div_rn(tl.full(divisor.shape, _SQUARE, tl.float32), divisor)
    bits_of_square = (groups * tl.expand_dims(scale, AXIS)).to(tl.int32, bitcast=True)
    root = ((bits_of_square & 0x7FFFFFFF) >> 1) + _HALF_ONE | (bits_of_square & _SIGN)
    code = tl.where(tl.expand_dims(usable, AXIS), to_integers(root.to(tl.float32, bitcast=True)), 0)
    return code, tl.where(usable, amax, tl.where(bits < INFINITY_BITS, 0.0, float("nan")))


@triton.jit
def decode_roots(codes, amaxes, AXIS: tl.constexpr):
    """`group_codes.decode_roots` of int8 codes, each group along the axis, the last."""
    bits = codes.to(tl.float32).to(tl.int32, bitcast=True)
    square = tl.maximum((bits - _HALF_ONE) << 1, 0) | (bits & _SIGN)  # the sign is shifted out
    return square.to(tl.float32, bitcast=True) * _INVERSE_SQUARE * tl.expand_dims(amaxes, AXIS)


@triton.jit
def encode_tile(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`encode_groups` of FP32 values, of ROWS times COLUMNS: (codes of their shape, amaxes [ROWS, COLUMNS / 128])."""
    code, amax = encode_roots(tl.reshape(values, (ROWS, COLUMNS // WIDTH, WIDTH)), 2)
    return tl.reshape(code.to(tl.int8), values.shape), amax


@triton.jit
def decode_tile(codes, amaxes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`decode_groups`: FP32 values of the codes' shape; amaxes are [ROWS, COLUMNS / 128]."""
    groups = tl.reshape(codes, (ROWS, COLUMNS // WIDTH, WIDTH))
    return tl.reshape(decode_roots(groups, amaxes.to(tl.float32), 2), codes.shape)


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

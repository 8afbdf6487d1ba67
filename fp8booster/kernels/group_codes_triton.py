"""Group codes inside kernels that have a row, or part of one, in registers, and sums of gradients in such codes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import INFINITY_BITS, magnitude_bits
from fp8booster.kernels.group_codes import GROUP, HALF_ONE, LARGEST_SQUARE, LEAST_AMAX, GroupCodes, require_addable
from fp8booster.kernels.launch import ceil_div, launch

WIDTH = tl.constexpr(GROUP)
# bits of values that a thread moves at once, with as many codes. Were it 16 codes, as the compiler would have it,
# values would move between threads, and a sum over a row would be added up in another order than without codes
AT_ONCE = tl.constexpr(128)

_LEAST, _SQUARE, _INVERSE_SQUARE = (tl.constexpr(each) for each in (LEAST_AMAX, LARGEST_SQUARE, 1 / LARGEST_SQUARE))
_HALF_ONE, _SIGN = tl.constexpr(HALF_ONE), tl.constexpr(-(2**31))

# a float32 whose last bit counts ones: a GPU adds floats 8 times as fast as it converts them to integers
_SHIFT = tl.constexpr(1.5 * 2**23)

_VALUES = 2048  # of a sum, a program's: a multiple of a group's


@triton.jit
def to_integers(x):
    """Round FP32 values of less than 2^22 to integers, half to even: int32, of which the low 22 bits are right."""
    return (x + _SHIFT).to(tl.int32, bitcast=True)


@triton.jit
def encode_roots(groups, AXIS: tl.constexpr):
    """Compute `group_codes.encode_roots` of groups along the axis, the last: (codes as int32, amaxes)."""
    bits = tl.max(magnitude_bits(groups), AXIS)
    amax = bits.to(tl.float32, bitcast=True)
    usable = (amax >= _LEAST) & (bits < INFINITY_BITS)
    divisor = tl.where(usable, amax, float("inf"))  # so the scale of what is not usable is 0, and codes are
    # rounded right, as the definition's division in FP64 is: Triton's own would be approximate
    scale = tl.math.div_rn(tl.full(divisor.shape, _SQUARE, tl.float32), divisor)
    bits_of_square = (groups * tl.expand_dims(scale, AXIS)).to(tl.int32, bitcast=True)
    root = ((bits_of_square & 0x7FFFFFFF) >> 1) + _HALF_ONE | (bits_of_square & _SIGN)
    code = tl.where(tl.expand_dims(usable, AXIS), to_integers(root.to(tl.float32, bitcast=True)), 0)
    return code, tl.where(usable, amax, tl.where(bits < INFINITY_BITS, 0.0, float("nan")))


@triton.jit
def decode_roots(codes, amaxes, AXIS: tl.constexpr):
    """Compute `group_codes.decode_roots` of int8 codes, each group along the axis, the last."""
    bits = codes.to(tl.float32).to(tl.int32, bitcast=True)
    square = tl.maximum((bits - _HALF_ONE) << 1, 0) | (bits & _SIGN)  # the sign is shifted out
    return square.to(tl.float32, bitcast=True) * _INVERSE_SQUARE * tl.expand_dims(amaxes, AXIS)


@triton.jit
def encode_tile(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Encode FP32 values, of ROWS times COLUMNS: (codes of their shape, amaxes [ROWS, COLUMNS / 128])."""
    code, amax = encode_roots(tl.reshape(values, (ROWS, COLUMNS // WIDTH, WIDTH)), 2)
    return tl.reshape(code.to(tl.int8), values.shape), amax


@triton.jit
def decode_tile(codes, amaxes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Decode to FP32 values of the codes' shape; amaxes are [ROWS, COLUMNS / 128]."""
    groups = tl.reshape(codes, (ROWS, COLUMNS // WIDTH, WIDTH))
    return tl.reshape(decode_roots(groups, amaxes.to(tl.float32), 2), codes.shape)


@triton.jit
def amax_place(row, column, columns, COLUMNS: tl.constexpr):
    """Return (place, mask) of the amaxes of a tile's groups, [rows, COLUMNS / 128].

    Args:
        row: int64 [rows, 1].
        column: of the tile's first value, a multiple of 128.
        columns: of the matrix.
    """
    groups = (columns + WIDTH - 1) // WIDTH
    group = column // WIDTH + tl.arange(0, COLUMNS // WIDTH)[None, :]
    return row * groups + group, group < groups


@triton.jit
def _place(count, VALUES: tl.constexpr):
    """Return (offset, mask) of a program's values, then of the amaxes of their groups, int64 [1, ...]."""
    start = tl.program_id(0).to(tl.int64) * VALUES
    index = start + tl.arange(0, VALUES)[None, :]
    group = start // WIDTH + tl.arange(0, VALUES // WIDTH)[None, :]
    return index, index < count, group, group * WIDTH < count


@triton.jit
def add_to_sums_kernel(codes, amaxes, gradients, count, VALUES: tl.constexpr):
    """Each program decodes VALUES values of a sum, adds a gradient and encodes them again."""
    index, inside, group, exists = _place(count, VALUES)
    amax = tl.load(amaxes + group, mask=exists, other=0.0)
    total = decode_tile(tl.load(codes + index, mask=inside, other=0), amax, 1, VALUES)
    total += tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    code, amax = encode_tile(tl.where(inside, total, 0.0), 1, VALUES)
    tl.store(codes + index, code, mask=inside)
    tl.store(amaxes + group, amax, mask=exists)


@triton.jit
def read_sums_kernel(codes, amaxes, gradients, totals, count, ADDS: tl.constexpr, VALUES: tl.constexpr):
    """Each program decodes VALUES values of a sum, and adds a gradient where ADDS."""
    index, inside, group, exists = _place(count, VALUES)
    amax = tl.load(amaxes + group, mask=exists, other=0.0)
    total = decode_tile(tl.load(codes + index, mask=inside, other=0), amax, 1, VALUES)
    if ADDS:
        total += tl.load(gradients + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(totals + index, total.to(totals.dtype.element_ty), mask=inside)


def add_to_sums_triton(sums: GroupCodes, gradient: Tensor) -> None:
    """Compute `add_to_sums`, byte for byte."""
    require_addable(sums, gradient)
    count = gradient.numel()
    if count:
        tensors, programs = (*sums, gradient), ceil_div(count, _VALUES)
        # no product and sum in one rounding: the definition rounds each
        launch(add_to_sums_kernel, programs, tensors, (count,), enable_fp_fusion=False, VALUES=_VALUES)


def read_sums_triton(sums: GroupCodes, gradient: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Compute `read_sums`, byte for byte."""
    if gradient is not None:
        require_addable(sums, gradient)
    count = sums.codes.numel()
    totals = sums.codes.new_empty(count, dtype=dtype)
    if count:
        launch(
            read_sums_kernel,
            ceil_div(count, _VALUES),
            (*sums, totals if gradient is None else gradient, totals),
            (count,),
            enable_fp_fusion=False,
            ADDS=gradient is not None,
            VALUES=_VALUES,
        )
    return totals

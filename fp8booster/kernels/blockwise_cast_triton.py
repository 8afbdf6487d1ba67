"""The blockwise cast on a GPU: one launch reads each tile once, finds its scales and writes it in both layouts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import BLOCK, aligned
from fp8booster.kernels.blockwise_cast import blockwise_outputs
from fp8booster.kernels.cast_triton import as_bytes, magnitude_bits, rounding, scale_from_bits, to_bits, widened
from fp8booster.kernels.launch import launch


@triton.jit
def blockwise_cast_kernel(
    x,
    plain,  # FP8 [out_rows, out_columns]
    transpose,  # FP8 [out_columns, out_rows]
    inverse_scale,  # float32, as `blockwise_cast` has it
    transpose_inverse_scale,
    rows,
    columns,
    row_stride,
    column_stride,
    out_rows,
    out_columns,
    scale_columns,  # of a row of blocks' inverse scales, in the plain layout
    transpose_scale_columns,
    column_tiles,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    SQUARE: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program casts one block of BLOCK x BLOCK values."""
    # one pass: a group or block lies within a tile, so its amax is found in registers
    tile = tl.program_id(0)
    row_tile, column_tile = (tile // column_tiles).to(tl.int64), (tile % column_tiles).to(tl.int64)
    row = row_tile * BLOCK + tl.arange(0, BLOCK)
    column = column_tile * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * row_stride + column[None, :] * column_stride, mask=inside, other=0.0)
    values = values.to(tl.float32)
    magnitudes = magnitude_bits(values)
    plain_place = as_bytes(plain) + row[:, None] * out_columns + column[None, :]
    transpose_place = as_bytes(transpose) + column[:, None] * out_rows + row[None, :]
    if SQUARE:  # the same block in the transpose: one scale, the same bytes
        scale, inverse = scale_from_bits(tl.max(tl.max(magnitudes, 1), 0), LIMIT, POWER_OF_TWO)
        bits = to_bits(values * scale, E4M3, LIMIT)
        if PLAIN:
            tl.store(plain_place, bits)
            tl.store(inverse_scale + row_tile * scale_columns + column_tile, inverse)
        if TRANSPOSED:
            tl.store(transpose_place, tl.trans(bits))
            tl.store(transpose_inverse_scale + column_tile * transpose_scale_columns + row_tile, inverse)
    else:  # groups lie along the rows of each layout, so each is rounded by itself
        if PLAIN:
            scale, inverse = scale_from_bits(tl.max(magnitudes, 1), LIMIT, POWER_OF_TWO)
            tl.store(plain_place, to_bits(values * scale[:, None], E4M3, LIMIT))
            tl.store(inverse_scale + column_tile * out_rows + row, inverse)
        if TRANSPOSED:
            scale, inverse = scale_from_bits(tl.max(magnitudes, 0), LIMIT, POWER_OF_TWO)
            tl.store(transpose_place, tl.trans(to_bits(values * scale[None, :], E4M3, LIMIT)))
            tl.store(transpose_inverse_scale + row_tile * out_columns + column, inverse)


def blockwise_cast_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    square: bool,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `blockwise_cast`, byte for byte."""
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:  # a transposed view: cast what it is a view of
        one, other, one_scale, other_scale = blockwise_cast_triton(
            matrix.t(), dtype, square=square, plain=transposed, transposed=plain, power_of_two=power_of_two
        )
        return other, one, other_scale, one_scale
    rows, columns = matrix.shape
    out_rows, out_columns = aligned(rows, BLOCK), aligned(columns, BLOCK)
    outputs = blockwise_outputs(matrix, dtype, square=square, plain=plain, transposed=transposed)
    matrix = widened(matrix)
    column_tiles, scale_columns = out_columns // BLOCK, (scales.shape[-1] for scales in outputs[2:])
    launch(
        blockwise_cast_kernel,
        column_tiles * (out_rows // BLOCK),
        (matrix, *outputs),
        (rows, max(columns, 2), *matrix.stride(), out_rows, out_columns, *scale_columns, column_tiles),
        num_warps=8,
        **rounding(dtype, power_of_two),
        SQUARE=square,
        PLAIN=plain,
        TRANSPOSED=transposed,
        BLOCK=BLOCK,
    )
    return outputs

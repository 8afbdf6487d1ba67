"""Statistics of a cast on a GPU: programs enough to keep memory busy, each with a part of its own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.alignment import BLOCK as GROUP
from fp8booster.kernels.cast_statistics import BEYOND, FIELDS
from fp8booster.kernels.launch import ceil_div, launch, processors

_BLOCK, _WARPS = 2048, 8
_PROGRAMS = 2  # for each processor

_CODES = {
    formats.E4M3: {"MANTISSA": 3, "REBIAS": 2.0**120, "NAN": 0x7F},
    formats.E5M2: {"MANTISSA": 2, "REBIAS": 2.0**112, "NAN": 0x7D},
}


@triton.jit
def cast_statistics_kernel(
    matrix,
    data,  # uint8
    inverse_scale,
    parts,  # float64 [programs, FIELDS]
    columns,
    count,
    tiles,
    row_stride,
    column_stride,
    data_row_stride,
    data_column_stride,
    scale_row_stride,
    scale_column_stride,
    MANTISSA: tl.constexpr,  # bits
    REBIAS: tl.constexpr,
    NAN: tl.constexpr,  # the first code of one
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,  # columns of a scale
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program takes every so many tiles as there are programs."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    index = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # counts as integers and powers in FP64, in registers until the end: FP32 sums of 2^24 ones stop growing
    amax = tl.zeros([BLOCK], tl.float32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    flushed = tl.zeros([BLOCK], tl.int32)
    saturated = tl.zeros([BLOCK], tl.int32)
    non_finite = tl.zeros([BLOCK], tl.int32)
    signal = tl.zeros([BLOCK], tl.float64)
    noise = tl.zeros([BLOCK], tl.float64)
    fourth = tl.zeros([BLOCK], tl.float64)
    for _ in range(program, tiles, programs):
        inside = index < count
        row, column = index // columns, index % columns
        value = tl.load(matrix + row * row_stride + column * column_stride, mask=inside, other=0.0).to(tl.float32)
        bits = tl.load(data + row * data_row_stride + column * data_column_stride, mask=inside, other=0)
        place = row * scale_row_stride + column // GROUP * scale_column_stride
        inverse = tl.load(inverse_scale + place, mask=inside, other=1.0).to(tl.float64)
        code = (bits & 0x7F).to(tl.int32)
        # as the bits of a float32 of this exponent and mantissa, which has another bias: the interpreter has no FP8
        rounded = (code << 23 - MANTISSA).to(tl.float32, bitcast=True).to(tl.float64) * REBIAS
        rounded = tl.where(code >= NAN, float("nan"), tl.where(bits >= 0x80, -rounded, rounded))
        is_finite = tl.abs(value) < float("inf")
        value = tl.where(is_finite, value, 0.0)
        is_nonzero = value != 0.0
        exact = value.to(tl.float64)
        error = tl.where(is_finite & inside, exact - rounded * inverse, 0.0)
        amax = tl.maximum(amax, tl.abs(value))
        nonzero += is_nonzero.to(tl.int32)
        flushed += (is_nonzero & (code == 0)).to(tl.int32)
        saturated += (tl.abs(exact) > LIMIT * inverse).to(tl.int32)
        non_finite += (inside & (is_finite == 0)).to(tl.int32)
        square = exact * exact
        signal += square
        fourth += square * square
        noise += error * error
        index += programs.to(tl.int64) * BLOCK
    own = parts + program * FIELDS
    tl.store(own, tl.max(amax, 0).to(tl.float64))
    tl.store(own + 1, tl.sum(nonzero, 0).to(tl.float64))
    tl.store(own + 2, tl.sum(flushed, 0).to(tl.float64))
    tl.store(own + 3, tl.sum(saturated, 0).to(tl.float64))
    tl.store(own + 4, tl.sum(non_finite, 0).to(tl.float64))
    tl.store(own + 5, tl.sum(signal, 0))
    tl.store(own + 6, tl.sum(noise, 0))
    tl.store(own + 7, tl.sum(fourth, 0))


def cast_statistics_triton(matrix: Tensor, data: Tensor, inverse_scale: Tensor) -> Tensor:
    """Compute `cast_statistics`, but for the last bits of the sums of powers."""
    # as many parts for every matrix of a device, so that those of many matrices can be stacked
    rows, columns = matrix.shape
    count, programs = rows * columns, _PROGRAMS * processors(matrix.device)
    parts = torch.empty(programs, len(FIELDS), dtype=torch.float64, device=matrix.device)
    launch(
        cast_statistics_kernel,
        programs,
        (matrix.detach(), data.view(torch.uint8), inverse_scale, parts),
        (
            max(1, columns),
            count,
            ceil_div(count, _BLOCK),
            *matrix.stride(),
            *data.stride(),
            *(*inverse_scale.stride(), 0, 0)[:2],
        ),
        num_warps=_WARPS,
        **_CODES[data.dtype],
        LIMIT=formats.MAX[data.dtype] * BEYOND,
        GROUP=GROUP,
        FIELDS=len(FIELDS),
        BLOCK=_BLOCK,
    )
    return parts

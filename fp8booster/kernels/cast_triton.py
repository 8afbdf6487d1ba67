"""The cast on a GPU: one launch finds the amax, one casts and writes both layouts.

Two passes, for no value can be rounded before the last was looked at. The amax launch leaves one partial maximum a
program, and each program of the cast launch takes the largest of them: no zeroing, no atomics, no host sync, the same
bits at every run. The cast walks the tiles from the last to the first, so that what the amax launch read last is still
in the L2 cache.

A cast by earlier amaxes needs no first pass: each of its programs stores the amax of its tile, for the next step.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels import scales
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import output_shapes
from fp8booster.kernels.launch import MOST_LAUNCHES, Launch, block_over, ceil_div, new_partials, processors

MAX_SCALE = tl.constexpr(scales.MAX_SCALE)
MAX_EXPONENT = tl.constexpr(127 + int(math.log2(scales.MAX_SCALE)))  # its exponent's bits in a float32
INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def magnitude_bits(x):
    """Return the bits of abs(x) as a float32: ordered like the magnitudes, NaN above infinity above all else."""
    # so integers find every amax here: tl.max of floats passes over a NaN, which must reach the scale
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax_kernel(
    x,
    partials,
    rows,
    columns,
    row_stride,
    column_stride,
    column_tiles,
    tile_count,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program stores the largest magnitude of every tile_count / programs-th tile."""
    largest = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
    for tile in tl.range(tl.program_id(0), tile_count, tl.num_programs(0)):
        # in 64 bits: an offset into a matrix of 2^31 values or more would wrap
        row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
        column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        values = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(values))
    amax = tl.max(tl.max(largest, 1), 0).to(tl.float32, bitcast=True)
    tl.store(partials + tl.program_id(0), amax)


@triton.jit
def scale_from_bits(bits, LIMIT: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return `scales.scale_of` of the amax whose bits these are: (scale, inverse scale)."""
    if POWER_OF_TWO:
        # by the exponents alone, for a division in FP64 takes long where many values have a scale of their own. Both
        # formats end at 1.75 times a power of two, so an amax with a larger mantissa takes one power of two less.
        limit_exponent: tl.constexpr = 8 if LIMIT == 448.0 else 15
        above = ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.minimum(254 + limit_exponent - (bits >> 23) - above, MAX_EXPONENT)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        amax = bits.to(tl.float32, bitcast=True)
        # both divisions in FP64, rounded once: Triton's division of float32 is approximate, and eager code's is not
        scale = tl.minimum(LIMIT / amax.to(tl.float64), MAX_SCALE).to(tl.float32)
        inverse = (1.0 / scale.to(tl.float64)).to(tl.float32)
    scale, inverse = tl.where(bits == 0, 1.0, scale), tl.where(bits == 0, 1.0, inverse)
    # an infinity would get the scale 0 and become NaN alone; with NaN the whole tensor tells of the bad step
    is_bad = bits >= INFINITY_BITS
    return tl.where(is_bad, float("nan"), scale), tl.where(is_bad, float("nan"), inverse)


@triton.jit
def largest_partial(partials, count, BLOCK: tl.constexpr):
    """Return the bits of the largest of `count` partial maxima."""
    index = tl.arange(0, BLOCK)
    return tl.max(magnitude_bits(tl.load(partials + index, mask=index < count, other=0.0)), 0)


# Not `mov.b32 $0, {low, high}`: where the values are constants, as zeros of a tile that lies outside, ptxas 12.8 then
# takes the lower half from the register that holds the stack's address.
_E4M3_ASSEMBLY = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 first, second;"
    " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
    " cvt.u32.u16 first, low; cvt.u32.u16 second, high;"
    " shl.b32 second, second, 16; or.b32 $0, first, second; }"
)
_E5M2_ASSEMBLY = tl.constexpr(_E4M3_ASSEMBLY.value.replace("e4m3x2", "e5m2x2"))
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def to_bits(values, E4M3: tl.constexpr, LIMIT: tl.constexpr):
    """Round FP32 values to FP8, saturating, and return bytes.

    By the instruction itself: an FP8 tile of Triton's own, stored in two layouts from FP32 input, came out wrong in a
    quarter of its bytes (Triton 3.6, as in its issue 11111).
    """
    if _INTERPRETED:  # which has no instructions
        values = tl.clamp(values, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return values.to(tl.float8e4nv if E4M3 else tl.float8e5).to(tl.uint8, bitcast=True)
    return tl.inline_asm_elementwise(
        _E4M3_ASSEMBLY if E4M3 else _E5M2_ASSEMBLY, "=r,f,f,f,f", [values], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def as_bytes(pointer):
    """Return a pointer to FP8 values as one to their bytes."""
    return pointer.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def store_transposed(transpose, bits, row, column, out_rows, out_columns):
    """Store a tile of bytes in the transpose, FP8 [out_columns, out_rows]."""
    # offsets are transposed with the tile: neighbours in the transpose then lie in one thread and move in whole vectors
    place = as_bytes(transpose) + tl.trans(column.to(tl.int64) * out_rows + row)
    tl.store(place, tl.trans(bits), mask=tl.trans((row < out_rows) & (column < out_columns)))


@triton.jit
def cast_kernel(
    x,
    partials,
    plain,  # FP8 [out_rows, out_columns]
    transpose,  # FP8 [out_columns, out_rows]
    inverse_scale,
    amaxes,  # float32, one for each program
    partial_count,
    rows,
    columns,
    row_stride,
    column_stride,
    out_rows,
    out_columns,
    column_tiles,
    E4M3: tl.constexpr,
    LIMIT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    PLAIN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    FINDS_AMAXES: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Each program casts one tile and writes it in the layouts asked for; the last tile's stores the inverse scale."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the last first: the amax launch has left it in the L2 cache
    row = (tile // column_tiles).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = (tile % column_tiles).to(tl.int64) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    values = tl.load(x + row * row_stride + column * column_stride, mask=inside, other=0.0)
    amax_bits = largest_partial(partials, partial_count, PARTIALS_BLOCK)
    scale, inverse = scale_from_bits(amax_bits, LIMIT, POWER_OF_TWO)
    bits = to_bits(values.to(tl.float32) * scale, E4M3, LIMIT)
    if PLAIN:
        writable = (row < out_rows) & (column < out_columns)  # the padding too: products read its zeros
        tl.store(as_bytes(plain) + row * out_columns + column, bits, mask=writable)
    if TRANSPOSED:
        store_transposed(transpose, bits, row, column, out_rows, out_columns)
    if tl.program_id(0) == 0:
        tl.store(inverse_scale, inverse)
    if FINDS_AMAXES:
        amax = tl.max(tl.max(magnitude_bits(values), 1), 0).to(tl.float32, bitcast=True)
        tl.store(amaxes + tl.program_id(0), amax)


@triton.jit
def note_kernel(
    history,
    amaxes,
    inverse_scale,
    count,
    steps,
    factor,
    NEW_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS_BLOCK: tl.constexpr,
):
    """One program notes the largest of `count` amaxes."""
    largest = tl.zeros([BLOCK], tl.int32)
    for begin in tl.range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(amaxes + index, mask=index < count, other=0.0)))
    bits = tl.max(largest, 0)
    noted = bits.to(tl.float32, bitcast=True) * factor
    noted_bits = magnitude_bits(noted)
    newest = tl.load(history)
    entry = noted if NEW_STEP else tl.maximum(newest, noted)
    # what is zero or not finite teaches no scale: the newest that is known stands for it
    entry = tl.where((noted_bits > 0) & (noted_bits < INFINITY_BITS), entry, newest)
    step = tl.arange(0, STEPS_BLOCK)
    past = tl.load(history + step, mask=step < steps, other=0.0)
    tl.debug_barrier()  # threads move entries by one place: all are read before one is written over
    if NEW_STEP:
        tl.store(history + 1 + step, past, mask=step < steps)
    tl.store(history, entry)
    tl.store(inverse_scale, float("nan"), mask=bits >= INFINITY_BITS)


# Chosen among 27 amax and 30 cast shapes by time on an H200 over [8192, 4096] to [16384, 8192].
_AMAX_COLUMNS = 4096
_AMAX_WARPS = 8
_AMAX_PROGRAMS_PER_PROCESSOR = 8
_LARGE = 2**26

_NOTE_BLOCK = 4096


def rounding(dtype: torch.dtype, power_of_two: bool) -> dict[str, bool | float]:
    """Return the constants by which a kernel rounds to FP8."""
    return {"E4M3": dtype is formats.E4M3, "LIMIT": formats.MAX[dtype], "POWER_OF_TWO": power_of_two}


def widened(matrix: Tensor) -> Tensor:
    """Return the matrix, or one with a second column of zeros if it has one column."""
    # Triton makes a size of one a constant, and with FP32 the loads that this masks bring garbage (seen with 3.6)
    return F.pad(matrix, (0, 1)) if matrix.shape[1] == 1 else matrix


def partial_amaxes_triton(matrix: Tensor) -> Tensor:
    """Compute `partial_amaxes`, one of each program."""
    if matrix.is_contiguous():
        launch, programs = _amax_launch(1, matrix.numel(), None, matrix.device)
    else:
        launch, programs = _amax_launch(*matrix.shape, matrix.stride(), matrix.device)
    partials = new_partials(programs, matrix)
    launch(programs, matrix, partials)
    return partials


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _amax_launch(rows: int, columns: int, strides: tuple[int, ...] | None, device: torch.device) -> tuple[Launch, int]:
    """Return the launch of `amax_kernel` and its number of programs; no strides: one contiguous row."""
    tile_rows, tile_columns = (1, _AMAX_COLUMNS) if strides is None else (16, _AMAX_COLUMNS // 16)
    column_tiles = ceil_div(columns, tile_columns)
    tile_count = column_tiles * ceil_div(rows, tile_rows)
    programs = min(tile_count, processors(device) * _AMAX_PROGRAMS_PER_PROCESSOR)
    numbers = (rows, columns, *((columns, 1) if strides is None else strides), column_tiles, tile_count)
    options = {"num_warps": _AMAX_WARPS, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    return Launch(amax_kernel, numbers, **options), programs


def cast_triton(
    matrix: Tensor,
    dtype: torch.dtype,
    *,
    plain: bool = True,
    transposed: bool = False,
    power_of_two: bool = False,
    amax: Tensor | None = None,
    finds_amaxes: bool = False,
) -> tuple[Tensor, ...]:
    """Compute `cast`, byte for byte; with `finds_amaxes` the amax of each tile too, float32 [tiles]."""
    rest = {"power_of_two": power_of_two, "amax": amax, "finds_amaxes": finds_amaxes}
    if matrix.stride(1) != 1 and matrix.stride(0) == 1:  # a transposed view: cast what it is a view of
        transpose, data, *others = cast_triton(matrix.t(), dtype, plain=transposed, transposed=plain, **rest)
        return data, transpose, *others
    rows, columns = matrix.shape
    if columns == 1:
        matrix = widened(matrix)
    partials = partial_amaxes_triton(matrix) if amax is None else amax.contiguous()
    launch, plain_shape, transposed_shape, tiles = _cast_launch(
        rows, columns, matrix.stride(), partials.numel(), dtype, plain, transposed, power_of_two, finds_amaxes
    )
    data = matrix.new_empty(plain_shape, dtype=dtype)
    transpose = matrix.new_empty(transposed_shape, dtype=dtype)
    inverse_scale = matrix.new_empty((), dtype=torch.float32)
    amaxes = (new_partials(tiles, matrix),) if finds_amaxes else ()
    # a pointer that is not written needs some tensor
    launch(tiles, matrix, partials, data, transpose, inverse_scale, *(amaxes or (inverse_scale,)))
    return data, transpose, inverse_scale, *amaxes


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _cast_launch(
    rows: int,
    columns: int,
    strides: tuple[int, ...],
    partial_count: int,
    dtype: torch.dtype,
    plain: bool,
    transposed: bool,
    power_of_two: bool,
    finds_amaxes: bool,
) -> tuple[Launch, tuple[int, ...], tuple[int, ...], int]:
    """Return the launch of `cast_kernel`, for a `widened` matrix; the shapes of both layouts; the number of tiles."""
    shapes = output_shapes(rows, columns, plain, transposed)
    out_rows, out_columns = aligned(rows), aligned(columns)
    columns = max(columns, 2)
    tile_rows, tile_columns = tile_shape(rows * columns, transposed)
    column_tiles = ceil_div(out_columns, tile_columns)
    tiles = column_tiles * ceil_div(out_rows, tile_rows)
    launch = Launch(
        cast_kernel,
        (partial_count, rows, columns, *strides, out_rows, out_columns, column_tiles),
        **rounding(dtype, power_of_two),
        PLAIN=plain,
        TRANSPOSED=transposed,
        FINDS_AMAXES=finds_amaxes,
        PARTIALS_BLOCK=block_over(partial_count),
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
    )
    return launch, *shapes, tiles


def tile_shape(values: int, transposed: bool) -> tuple[int, int]:
    """Return the rows and columns of the tiles in which so many values are cast."""
    if transposed:  # tall enough that a row of the transposed tile fills whole sectors of memory, too
        return (64, 128) if values > _LARGE else (64, 64)
    return 32, 256


def cast_by_triton(matrix: Tensor, dtype: torch.dtype, past: Tensor, **options: bool) -> tuple[Tensor, ...]:
    """Compute `cast_by`, byte for byte but for how many amaxes there are."""
    return cast_triton(matrix, dtype, amax=past, finds_amaxes=True, **options)


def note_amax_triton(
    history: Tensor, amaxes: Tensor, inverse_scale: Tensor, *, new_step: bool, factor: float = 1.0
) -> None:
    """Compute `note_amax`, byte for byte."""
    amaxes = amaxes.contiguous()
    _note_launch(amaxes.numel(), history.numel() - 1, factor, new_step)(1, history, amaxes, inverse_scale)


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _note_launch(count: int, steps: int, factor: float, new_step: bool) -> Launch:
    blocks = {"BLOCK": min(_NOTE_BLOCK, block_over(count)), "STEPS_BLOCK": block_over(steps)}
    return Launch(note_kernel, (count, steps, float(factor)), NEW_STEP=new_step, **blocks)

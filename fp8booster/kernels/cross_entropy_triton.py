"""Cross entropy on a GPU: one launch reads each row of logits for its loss, and once more for its gradient.

The first read finds the largest logit and the sum of exponentials together (Milakov and Gimelshein, arXiv 1805.02867).
With few programs a processor the rows in flight fit into the L2 cache, so memory is read once and written once. The
gradient alone, where the sum of exponentials is given, reads and writes once, whatever a cache holds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.cast_triton import magnitude_bits
from fp8booster.kernels.launch import ceil_div, launch, new_partials, processors

# a processor: 396 rows of 32000 BF16 logits in flight on an H100 are 25 MB, and its L2 cache holds 50 MB
PROGRAMS = 3
BLOCK = 4096  # columns at a time
_GRADIENT_PROGRAMS, _GRADIENT_BLOCK = 4, 2048  # of the gradient alone
_MULTIPLY_PROGRAMS, _MULTIPLY_BLOCK = 8, 4096  # a processor; values at a time


@triton.jit
def add_exponentials(values, largest, total):
    """Take values [L, W] into the largest value and the sum of exponentials relative to it of each of L lanes."""
    # tl.max passes over NaN, which the sum keeps. The sum so far is scaled to the new largest value: one read of the
    # row finds both, and no exponential overflows.
    new = tl.maximum(largest, tl.max(values, 1))
    base = finite_base(new)
    return new, total * tl.exp(largest - base) + tl.sum(tl.exp(values - base[:, None]), 1)


@triton.jit
def finite_base(largest):
    """Return the base of exponentials: the largest value, or 0 in place of minus infinity."""
    return tl.where(largest == -float("inf"), 0.0, largest)


@triton.jit
def gradient_of(values, column, target, base, inverse_total, factor):
    """Return (softmax - onehot) * factor."""
    softmax = tl.exp(values - base) * inverse_total
    return tl.where(column == target, softmax - 1.0, softmax) * factor


@triton.jit
def adjust(values, inside, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Return logits as the loss has them; what is not inside stays minus infinity."""
    if CAP > 0:
        return tl.where(inside, CAP * tanh(values * (SCALE / CAP)), -float("inf"))
    return values if SCALE == 1.0 else values * SCALE


@triton.jit
def slope_of(values, gradient, SCALE: tl.constexpr, CAP: tl.constexpr):
    """Return the gradient of values from that of the adjusted ones."""
    if CAP > 0:
        y = tanh(values * (SCALE / CAP))
        return gradient * (SCALE * (1.0 - y * y))
    return gradient if SCALE == 1.0 else gradient * SCALE


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp(2.0 * x))


@triton.jit
def write_zeros(x, lane, blocks, columns, TAIL: tl.constexpr, BLOCK: tl.constexpr):
    """Over a row: whole blocks, and what is left where TAIL."""
    zeros = tl.zeros(lane.shape, tl.float32).to(x.dtype.element_ty)
    for block in tl.range(0, blocks):
        tl.store(x + block * BLOCK + lane, zeros)
    if TAIL:
        tail = blocks * BLOCK + lane
        tl.store(x + tail, zeros, mask=tail < columns)


@triton.jit
def cross_entropy_kernel(
    logits,
    targets,
    losses,
    factor,
    partials,
    rows,
    columns,
    row_stride,
    ignore_index,
    SCALE: tl.constexpr,
    CAP: tl.constexpr,  # 0 for none
    LOSS: tl.constexpr,  # else `losses` takes each row's log-sum-exp
    GRADIENT: tl.constexpr,
    TAIL: tl.constexpr,  # whether the last block is not whole
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Each program takes every num_programs-th row."""
    BLOCK: tl.constexpr = LANES * WIDTH
    lane = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    blocks = columns // BLOCK
    tail = blocks * BLOCK + lane
    amax_bits = tl.zeros([LANES], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x = logits + tl.cast(row, tl.int64) * row_stride
        target = tl.load(targets + row)
        if target == ignore_index:
            tl.store(losses + row, 0.0)
            if GRADIENT:
                write_zeros(x, lane, blocks, columns, TAIL, BLOCK)
        else:
            # before the row is overwritten: the reductions over lanes are barriers between. NaN of a target that is no
            # column makes the row's loss NaN.
            inside = (target >= 0) & (target < columns)
            at_target = 0.0
            if LOSS:
                at_target = tl.load(x + target, mask=inside, other=float("nan")).to(tl.float32)
                at_target = adjust(at_target, True, SCALE, CAP)
            # for each lane by itself, of as many columns as a thread loads at once: threads meet only at the row's end
            largest_of_lane = tl.full([LANES], -float("inf"), tl.float32)
            total_of_lane = tl.zeros([LANES], tl.float32)
            # whole blocks without masks, so that they move in whole vectors; what is left is a piece of its own
            for block in tl.range(0, blocks):
                values = adjust(tl.load(x + block * BLOCK + lane).to(tl.float32), True, SCALE, CAP)
                largest_of_lane, total_of_lane = add_exponentials(values, largest_of_lane, total_of_lane)
            if TAIL:
                values = tl.load(x + tail, mask=tail < columns, other=-float("inf")).to(tl.float32)
                values = adjust(values, tail < columns, SCALE, CAP)
                largest_of_lane, total_of_lane = add_exponentials(values, largest_of_lane, total_of_lane)
            largest = tl.max(largest_of_lane, 0)
            base = finite_base(largest)
            total = tl.sum(total_of_lane * tl.exp(largest_of_lane - base), 0)
            tl.store(losses + row, tl.log(total) + (largest - at_target))
            if GRADIENT:
                inverse_total = tl.where(inside, 1.0 / total, float("nan"))
                place = tl.where(inside, target, -1).to(tl.int32)
                scale = tl.load(factor)
                if TAIL:
                    values = tl.load(x + tail, mask=tail < columns, other=-float("inf")).to(tl.float32)
                    adjusted = adjust(values, tail < columns, SCALE, CAP)
                    out = gradient_of(adjusted, tail, place, base, inverse_total, scale)
                    out = slope_of(values, out, SCALE, CAP).to(logits.dtype.element_ty)
                    tl.store(x + tail, out, mask=tail < columns)
                    # beyond the last column minus infinity was read: the gradient there is zero, or NaN as in all
                    amax_bits = tl.maximum(amax_bits, tl.max(magnitude_bits(out), 1))
                # from the row's end to its beginning: what the first read last is still in a cache
                for back in tl.range(0, blocks):
                    column = (blocks - 1 - back) * BLOCK + lane
                    values = tl.load(x + column).to(tl.float32)
                    adjusted = adjust(values, True, SCALE, CAP)
                    out = gradient_of(adjusted, column, place, base, inverse_total, scale)
                    out = slope_of(values, out, SCALE, CAP).to(logits.dtype.element_ty)
                    tl.store(x + column, out)
                    amax_bits = tl.maximum(amax_bits, tl.max(magnitude_bits(out), 1))
    if GRADIENT:
        tl.store(partials + tl.program_id(0), tl.max(amax_bits, 0).to(tl.float32, bitcast=True))


def cross_entropy_triton(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int,
    factor: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute `cross_entropy`, up to the order of sums, with the gradient's amax."""
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits) == 0:
        return losses, None if factor is None else losses.new_zeros(1)
    partials = None if factor is None else new_partials(_programs(logits), logits)
    _launch(logits, targets, losses, ignore_index, factor, partials, loss=True, scale=scale, cap=cap)
    if factor is not None:  # whoever holds the logits, as a checkpoint may, can tell
        torch.autograd.graph.increment_version(logits)
    return losses, partials


def logsumexp_triton(logits: Tensor, targets: Tensor, *, ignore_index: int) -> Tensor:
    """Compute `logsumexp`, up to the order of sums."""
    sums = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _launch(logits, targets, sums, ignore_index, None, None, loss=False)
    return sums


def _programs(logits: Tensor, most: int = PROGRAMS) -> int:
    return min(len(logits), most * processors(logits.device))


def _launch(
    logits: Tensor,
    targets: Tensor,
    out: Tensor,
    ignore_index: int,
    factor: Tensor | None,
    partials: Tensor | None,
    *,
    loss: bool,
    scale: float = 1.0,
    cap: float | None = None,
) -> None:
    rows, columns = logits.shape
    width = 16 // logits.element_size()
    # a lane is as wide as one load of a thread; fewer lanes for short rows, which would leave threads idle
    lanes = min(BLOCK // width, max(1, 1 << (ceil_div(columns, width) - 1).bit_length()))
    # pointers that are not read need some tensor
    of_gradient = [out if tensor is None else tensor for tensor in (factor, partials)]
    launch(
        cross_entropy_kernel,
        _programs(logits),
        (logits, targets.contiguous(), out, *of_gradient),
        (rows, columns, logits.stride(0), ignore_index),
        num_warps=min(16, max(1, lanes // 32)),
        # values * scale - largest, rounded once, is no zero for the largest: too far from it where logits are huge
        enable_fp_fusion=scale == 1.0,
        SCALE=float(scale),
        CAP=0.0 if cap is None else float(cap),
        LOSS=loss,
        GRADIENT=factor is not None,
        TAIL=columns % (lanes * width) != 0,
        LANES=lanes,
        WIDTH=width,
    )


@triton.jit
def cross_entropy_gradient_kernel(
    logits,
    targets,
    totals,
    factor,
    partials,
    rows,
    columns,
    row_stride,
    ignore_index,
    TAIL: tl.constexpr,  # whether the last block is not whole
    BLOCK: tl.constexpr,
):
    """Each program takes every num_programs-th row."""
    lane = tl.arange(0, BLOCK)
    blocks = columns // BLOCK
    tail = blocks * BLOCK + lane
    scale = tl.load(factor)
    amax_bits = tl.zeros([BLOCK], tl.int32)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        x = logits + tl.cast(row, tl.int64) * row_stride
        target = tl.load(targets + row)
        if target == ignore_index:
            write_zeros(x, lane, blocks, columns, TAIL, BLOCK)
        else:
            # a target that lies on another rank is -1, no column's number: this part has no one-hot to take off
            place = tl.where((target >= 0) & (target < columns), target, -1).to(tl.int32)
            logsumexp = tl.load(totals + row)
            for block in tl.range(0, blocks):
                column = block * BLOCK + lane
                values = tl.load(x + column).to(tl.float32)
                out = gradient_of(values, column, place, logsumexp, 1.0, scale).to(logits.dtype.element_ty)
                tl.store(x + column, out)
                amax_bits = tl.maximum(amax_bits, magnitude_bits(out))
            if TAIL:
                values = tl.load(x + tail, mask=tail < columns, other=-float("inf")).to(tl.float32)
                out = gradient_of(values, tail, place, logsumexp, 1.0, scale).to(logits.dtype.element_ty)
                tl.store(x + tail, out, mask=tail < columns)
                # beyond the last column, as above, zero or NaN
                amax_bits = tl.maximum(amax_bits, magnitude_bits(out))
    tl.store(partials + tl.program_id(0), tl.max(amax_bits, 0).to(tl.float32, bitcast=True))


def write_gradient_triton(
    logits: Tensor, targets: Tensor, logsumexp: Tensor, *, ignore_index: int, factor: Tensor
) -> Tensor:
    """Compute `write_gradient`, with the gradient's amax."""
    rows, columns = logits.shape
    if rows == 0 or columns == 0:
        return torch.zeros(1, dtype=torch.float32, device=logits.device)
    programs = _programs(logits, _GRADIENT_PROGRAMS)
    partials = new_partials(programs, logits)
    block = min(_GRADIENT_BLOCK, max(128, 1 << (columns - 1).bit_length()))
    launch(
        cross_entropy_gradient_kernel,
        programs,
        (logits, targets.contiguous(), logsumexp.contiguous(), factor, partials),
        (rows, columns, logits.stride(0), ignore_index),
        num_warps=min(8, block // 128),
        TAIL=columns % block != 0,
        BLOCK=block,
    )
    return partials


@triton.jit
def multiply_kernel(x, factor, count, blocks, BLOCK: tl.constexpr):
    """Each program multiplies every num_programs-th block."""
    # here, not on the host, which would wait for the device; the launch then reads nothing else
    scale = tl.load(factor)
    if scale != 1.0:  # NaN is not 1 either
        for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0)):
            index = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(x + index, mask=index < count, other=0.0).to(tl.float32)
            tl.store(x + index, (values * scale).to(x.dtype.element_ty), mask=index < count)


def multiply_triton(tensor: Tensor, factor: Tensor) -> Tensor:
    """Compute `multiply_`, bit for bit."""
    count = tensor.numel()
    blocks = ceil_div(count, _MULTIPLY_BLOCK)
    if blocks:
        programs = min(blocks, _MULTIPLY_PROGRAMS * processors(tensor.device))
        launch(multiply_kernel, programs, (tensor, factor), (count, blocks), num_warps=8, BLOCK=_MULTIPLY_BLOCK)
    return tensor

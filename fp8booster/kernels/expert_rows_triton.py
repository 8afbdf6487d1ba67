"""The rows of experts on a GPU: three launches that sort by counting, or one where choices lie sorted by sender.

Each expert's choices are counted in blocks, the counts of the blocks before are summed, and a choice's place follows
from those before it in its own block. So the order is that of the choices, with no atomics. Of choices by sender the
counts are known.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.cast_triton import largest_partial
from fp8booster.kernels.expert_rows import ExpertRows, most_rows, most_sent_rows
from fp8booster.kernels.launch import block_over, ceil_div, launch

COUNTED, PLACED, PART = 512, 128, 32
"""Choices of a block, of a program that places them, and of those that it compares at once. One program alone sums
over the blocks, so these are few."""

EXPERTS, BLOCKS = 128, 64  # of a tile

AT_ONCE, FEW = 2048, 8
"""Choices that a program counts at once where it counts all of a few experts'."""

SENT, PROGRAMS = 256, 32
"""Choices that a program places at once of those from senders, and programs of an expert."""


@triton.jit
def count_kernel(
    owners,
    counts,  # int32 [blocks, experts]
    choices,
    experts,
    COUNTED: tl.constexpr,
    PART: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each program counts one block's choices of a tile of experts."""
    block = tl.program_id(0)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in tl.range(block * COUNTED, (block + 1) * COUNTED, PART):
        choice = first + tl.arange(0, PART)
        owner = tl.load(owners + choice, mask=choice < choices, other=-1).to(tl.int32)
        count += tl.sum((owner[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + block * experts + expert, count, mask=expert < experts)


@triton.jit
def padded_size(total, inside, ALIGNMENT: tl.constexpr):
    """Return the rows of experts inside, of whose choices the totals are given."""
    size = tl.where(inside, total, 0)
    if ALIGNMENT > 1:
        # the sum of the weight gradient over no rows would be refused
        size = tl.where(inside, tl.maximum((total + ALIGNMENT - 1) // ALIGNMENT, 1) * ALIGNMENT, 0)
    return size


@triton.jit
def begin_kernel(
    counts,  # becomes the choices of the same expert in the blocks before
    starts,  # int32 [experts]
    ends,
    held,  # the choice of each row: written where rows pad
    blocks,
    experts,
    most,
    ALIGNMENT: tl.constexpr,  # 1: no rows pad
    BLOCKS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program finds where experts begin and end."""
    start = 0
    padding = tl.arange(0, ALIGNMENT)[None, :]
    for first in tl.range(0, experts, EXPERTS):
        expert = first + tl.arange(0, EXPERTS)
        inside = expert < experts
        total = tl.zeros([EXPERTS], tl.int32)
        for first_block in tl.range(0, blocks, BLOCKS):
            block = first_block + tl.arange(0, BLOCKS)[:, None]
            place = counts + block * experts + expert[None, :]
            known = (block < blocks) & inside[None, :]
            count = tl.load(place, mask=known, other=0)
            tl.store(place, tl.cumsum(count, 0) - count + total[None, :], mask=known)
            total += tl.sum(count, 0)
        size = padded_size(total, inside, ALIGNMENT)
        end = start + tl.cumsum(size, 0)
        tl.store(starts + expert, end - size, mask=inside)
        tl.store(ends + expert, tl.where(expert == experts - 1, most, end), mask=inside)
        row = (end - size + total)[:, None] + padding
        tl.store(held + row, tl.full([EXPERTS, ALIGNMENT], -1, tl.int32), mask=row < end[:, None])
        start += tl.sum(size, 0)
    # what is spare: at most a row of padding for each expert
    for first in tl.range(0, experts, EXPERTS):
        row = start + (first + tl.arange(0, EXPERTS))[:, None] * ALIGNMENT + padding
        tl.store(held + row, tl.full([EXPERTS, ALIGNMENT], -1, tl.int32), mask=row < most)


@triton.jit
def place_kernel(
    owners,
    counts,
    starts,
    places,
    held,
    choices,
    experts,
    COUNTED: tl.constexpr,
    PLACED: tl.constexpr,
    PART: tl.constexpr,
):
    """Each program places a part of a block's choices, behind those of the same expert before them."""
    choice = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    owner = tl.load(owners + choice, mask=choice < choices, other=-1).to(tl.int32)
    inside = (owner >= 0) & (owner < experts)  # a number that is no expert's is written nowhere
    block = tl.program_id(0) * PLACED // COUNTED
    row = tl.load(starts + owner, mask=inside, other=0)
    row += tl.load(counts + block * experts + owner, mask=inside, other=0)
    for first in tl.range(block * COUNTED, (tl.program_id(0) + 1) * PLACED, PART):
        other = first + tl.arange(0, PART)
        its_owner = tl.load(owners + other, mask=other < choices, other=-1).to(tl.int32)
        before = (its_owner[None, :] == owner[:, None]) & (other[None, :] < choice[:, None])
        row += tl.sum(before.to(tl.int32), 1)
    tl.store(places + choice, row.to(tl.int64), mask=inside)
    tl.store(held + row, choice, mask=inside)


@triton.jit
def tell_kernel(
    owners,
    numbers,  # int64 [ranks, columns]
    amaxes,
    choices,
    ranks,
    columns,
    held,
    partials,
    AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,  # 0: no amax is told
):
    """Each program counts all choices of a tile of experts; the first also tells the amax."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in tl.range(0, choices, AT_ONCE):
        choice = first + tl.arange(0, AT_ONCE)
        owner = tl.load(owners + choice, mask=choice < choices, other=-1).to(tl.int32)
        count += tl.sum((owner[:, None] == expert[None, :]).to(tl.int32), 0)
    place = expert // held * columns + expert % held
    tl.store(numbers + place, count.to(tl.int64), mask=expert < ranks * held)
    if PARTIALS_BLOCK and tl.program_id(0) == 0:
        rank = tl.arange(0, RANKS)
        bits = tl.full([RANKS], largest_partial(amaxes, partials, PARTIALS_BLOCK), tl.int64)
        tl.store(numbers + rank * columns + held, bits, mask=rank < ranks)


@triton.jit
def sent_kernel(
    counts,  # int64 [senders, experts], rows `stride` apart
    ends,
    places,
    held,
    senders,
    experts,
    stride,
    most,
    ALIGNMENT: tl.constexpr,
    SENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    SENDERS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Each program places a part of what each sender sent to one expert; the first of an expert also pads."""
    own, program = tl.program_id(0), tl.program_id(1)
    sender, expert = tl.arange(0, SENDERS), tl.arange(0, EXPERTS)
    inside = (sender < senders)[:, None] & (expert < experts)[None, :]
    count = tl.load(counts + sender[:, None] * stride + expert[None, :], mask=inside, other=0).to(tl.int32)
    total = tl.sum(count, 0)
    size = padded_size(total, expert < experts, ALIGNMENT)
    start = tl.sum(tl.where(expert < own, size, 0), 0)
    end = start + tl.sum(tl.where(expert == own, size, 0), 0)
    taken = start + tl.sum(tl.where(expert == own, total, 0), 0)
    of_own = tl.sum(tl.where((expert == own)[None, :], count, 0), 1)
    of_sender = tl.sum(count, 1)
    # where what each sender sent to this expert begins, among its choices and among the expert's rows
    first_choice = tl.cumsum(of_sender, 0) - of_sender + tl.sum(tl.where((expert < own)[None, :], count, 0), 1)
    first_row = start + tl.cumsum(of_own, 0) - of_own
    for number in tl.range(0, senders):
        is_it = sender == number
        rows = tl.sum(tl.where(is_it, of_own, 0), 0)
        choice = tl.sum(tl.where(is_it, first_choice, 0), 0)
        row = tl.sum(tl.where(is_it, first_row, 0), 0)
        for first in tl.range(program * SENT, rows, PROGRAMS * SENT):
            place = first + tl.arange(0, SENT)
            tl.store(places + choice + place, (row + place).to(tl.int64), mask=place < rows)
            tl.store(held + row + place, choice + place, mask=place < rows)
    if program == 0:
        end = tl.where(own == experts - 1, most, end)  # what is spare pads the last
        tl.store(ends + own, end)
        for first in tl.range(taken, end, SENT):
            place = first + tl.arange(0, SENT)
            tl.store(held + place, tl.full([SENT], -1, tl.int32), mask=place < end)


def expert_rows_triton(owners: Tensor, experts: int, padded: bool = True) -> ExpertRows:
    """Compute `expert_rows`, number for number."""
    choices = len(owners)
    most = most_rows(choices, experts) if padded else choices
    blocks = ceil_div(choices, COUNTED)
    # the last of the counts: where experts start
    counts = owners.new_empty(blocks + 1, experts, dtype=torch.int32)
    starts = counts[blocks]
    ends, held = (owners.new_empty(size, dtype=torch.int32) for size in (experts, most))
    places = owners.new_empty(choices, dtype=torch.int64)
    tile = min(EXPERTS, block_over(experts))
    if choices:
        grid = (blocks, ceil_div(experts, tile))
        launch(count_kernel, grid, (owners, counts), (choices, experts), COUNTED=COUNTED, PART=PART, EXPERTS=tile)
    numbers = (blocks, experts, most)
    launch(
        begin_kernel,
        1,
        (counts, starts, ends, held),
        numbers,
        num_warps=8,
        ALIGNMENT=ALIGNMENT if padded else 1,
        BLOCKS=BLOCKS,
        EXPERTS=tile,
    )
    if choices:
        tensors = (owners, counts, starts, places, held)
        programs, sizes = ceil_div(choices, PLACED), {"COUNTED": COUNTED, "PLACED": PLACED, "PART": PART}
        launch(place_kernel, programs, tensors, (choices, experts), num_warps=8, **sizes)
    return ExpertRows(ends, places, held)


def sent_rows_triton(counts: Tensor, choices: int) -> ExpertRows:
    """Compute `sent_rows`, number for number."""
    senders, experts = counts.shape
    most = most_sent_rows(choices, experts)
    ends, held = (counts.new_empty(size, dtype=torch.int32) for size in (experts, most))
    places = counts.new_empty(choices)
    launch(
        sent_kernel,
        (experts, PROGRAMS),
        (counts, ends, places, held),
        (senders, experts, counts.stride(0), most),
        ALIGNMENT=ALIGNMENT,
        SENT=SENT,
        PROGRAMS=PROGRAMS,
        SENDERS=block_over(senders),
        EXPERTS=block_over(experts),
    )
    return ExpertRows(ends, places, held)


def count_choices_triton(owners: Tensor, numbers: Tensor, held: int, amaxes: Tensor | None = None) -> None:
    """Compute `count_choices`; the bits of a NaN may be others."""
    ranks, columns = numbers.shape
    partials = 0 if amaxes is None else len(amaxes)
    experts = min(FEW, block_over(ranks * held))
    launch(
        tell_kernel,
        ceil_div(ranks * held, experts),
        (owners, numbers, numbers if amaxes is None else amaxes),
        (len(owners), ranks, columns, held, partials),
        num_warps=8,
        AT_ONCE=AT_ONCE,
        EXPERTS=experts,
        RANKS=block_over(ranks),
        PARTIALS_BLOCK=block_over(partials) if partials else 0,
    )

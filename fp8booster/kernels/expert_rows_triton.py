"""The rows of experts on a GPU: three launches that sort by counting, and what ranks tell each other of choices.

Each expert's choices are counted in blocks, the counts of the blocks before are summed, and a choice's place follows
from those before it in its own block. So the order is that of the choices, with no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.cast_triton import largest_partial
from fp8booster.kernels.expert_rows import ExpertRows, most_counted_rows, most_rows
from fp8booster.kernels.launch import block_over, ceil_div, launch

COUNTED, PLACED, PART = 512, 128, 32
"""Choices of a block, of a program that places them, and of those that it compares at once. One program alone sums
over the blocks, so these are few."""

EXPERTS, BLOCKS = 128, 64  # of a tile

AT_ONCE, FEW = 2048, 8
"""Choices that a program counts at once where it counts all of a few experts'."""

PACKED, PADDED = 128, 256
"""Choices, or rows or tokens with all of theirs, of a program; rows that pad, which it writes at once."""


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
    # the sum of the weight gradient over no rows would be refused
    return tl.where(inside, tl.maximum((total + ALIGNMENT - 1) // ALIGNMENT, 1) * ALIGNMENT, 0)


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
    IS_PADDED: tl.constexpr = ALIGNMENT > 1
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
        size = tl.where(inside, total, 0)
        if IS_PADDED:
            size = padded_size(total, inside, ALIGNMENT)
        end = start + tl.cumsum(size, 0)
        tl.store(starts + expert, end - size, mask=inside)
        tl.store(ends + expert, tl.where(IS_PADDED & (expert == experts - 1), most, end), mask=inside)
        if IS_PADDED:
            row = (end - size + total)[:, None] + padding
            tl.store(held + row, tl.full([EXPERTS, ALIGNMENT], -1, tl.int32), mask=row < end[:, None])
        start += tl.sum(size, 0)
    if IS_PADDED:  # what is spare
        for first in tl.range(start, most, EXPERTS * ALIGNMENT):
            row = first + tl.arange(0, EXPERTS * ALIGNMENT)
            tl.store(held + row, tl.full([EXPERTS * ALIGNMENT], -1, tl.int32), mask=row < most)


@triton.jit
def place_kernel(
    owners,
    counts,
    starts,
    places,
    held,
    choices,
    experts,
    most,
    COUNTED: tl.constexpr,
    PLACED: tl.constexpr,
    PART: tl.constexpr,
):
    """Each program places a part of a block's choices, behind those of the same expert before them."""
    choice = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    owner = tl.load(owners + choice, mask=choice < choices, other=-1).to(tl.int32)
    inside = (owner >= 0) & (owner < experts)
    block = tl.program_id(0) * PLACED // COUNTED
    row = tl.load(starts + owner, mask=inside, other=0)
    row += tl.load(counts + block * experts + owner, mask=inside, other=0)
    for first in tl.range(block * COUNTED, (tl.program_id(0) + 1) * PLACED, PART):
        other = first + tl.arange(0, PART)
        its_owner = tl.load(owners + other, mask=other < choices, other=-1).to(tl.int32)
        before = (its_owner[None, :] == owner[:, None]) & (other[None, :] < choice[:, None])
        row += tl.sum(before.to(tl.int32), 1)
    tl.store(places + choice, tl.where(inside, row, most).to(tl.int64), mask=choice < choices)
    tl.store(held + row, choice, mask=inside & (row < most))


@triton.jit
def tell_kernel(
    owners,
    numbers,  # int64 [ranks, columns]
    amaxes,
    ends,  # int32 [ranks], where ENDS
    choices,
    ranks,
    columns,
    held,
    partials,
    AT_ONCE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    PARTIALS_BLOCK: tl.constexpr,  # 0: no amax is told
    ENDS: tl.constexpr,
):
    """Each program counts all choices of a tile of experts; the first also tells the amax and the rows of ranks."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for first in tl.range(0, choices, AT_ONCE):
        choice = first + tl.arange(0, AT_ONCE)
        owner = tl.load(owners + choice, mask=choice < choices, other=-1).to(tl.int32)
        count += tl.sum((owner[:, None] == expert[None, :]).to(tl.int32), 0)
    place = expert // held * columns + expert % held
    tl.store(numbers + place, count.to(tl.int64), mask=expert < ranks * held)
    rank = tl.arange(0, RANKS)
    if ENDS and tl.program_id(0) == 0:
        end = tl.load(ends + rank, mask=rank < ranks, other=0)
        before = tl.load(ends + rank - 1, mask=(rank > 0) & (rank < ranks), other=0)
        tl.store(numbers + rank * columns + held + 1, (end - before).to(tl.int64), mask=rank < ranks)
    if PARTIALS_BLOCK and tl.program_id(0) == 0:
        bits = tl.full([RANKS], largest_partial(amaxes, partials, PARTIALS_BLOCK), tl.int64)
        tl.store(numbers + rank * columns + held, bits, mask=rank < ranks)


@triton.jit
def first_kernel(
    chosen,
    owners,  # int32, as many
    choices,
    held,
    ranks,
    OF_TOKEN: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Each program compares each choice of a block with those of its token before it."""
    choice = tl.program_id(0) * PACKED + tl.arange(0, PACKED)
    inside = choice < choices
    rank = tl.load(chosen + choice, mask=inside, other=0).to(tl.int32) // held
    number = choice % OF_TOKEN
    again = choice < 0
    for before in tl.static_range(OF_TOKEN - 1):
        is_before = inside & (before < number)
        other = tl.load(chosen + choice - number + before, mask=is_before, other=0).to(tl.int32) // held
        again = again | (is_before & (other == rank))
    tl.store(owners + choice, tl.where(again, ranks, rank), mask=inside)


@triton.jit
def pack_kernel(
    chosen,
    weights,
    choices,
    places,
    ends,
    words,  # int32, rows `stride` apart
    values,  # float32, the same memory
    rows,
    held,
    stride,
    width,
    OF_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,  # OF_TOKEN or more
    PACKED: tl.constexpr,
):
    """Each program packs the choices of a block of rows."""
    row = tl.program_id(0) * PACKED + tl.arange(0, PACKED)
    choice = tl.load(choices + row, mask=row < rows, other=0)
    first = tl.load(chosen + choice, mask=row < rows, other=0).to(tl.int32) // held * held
    number = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None] & (number < OF_TOKEN)
    place = (choice // OF_TOKEN)[:, None] * OF_TOKEN + number
    expert = tl.load(chosen + place, mask=inside, other=0).to(tl.int32)
    own = expert - first[:, None]
    before = tl.load(places + place, mask=inside, other=0).to(tl.int32)
    before -= tl.load(ends + expert - 1, mask=inside & (expert > 0), other=0)
    weight = tl.load(weights + place, mask=inside, other=0.0).to(tl.float32)
    to = row.to(tl.int64)[:, None] * stride + number
    tl.store(words + to, tl.where((own < 0) | (own >= held), held, own), mask=inside)
    tl.store(words + to + OF_TOKEN, before, mask=inside)
    tl.store(values + to + 2 * OF_TOKEN, weight, mask=inside)
    spare = (row < rows)[:, None] & (number + 3 * OF_TOKEN < width)
    tl.store(words + to + 3 * OF_TOKEN, tl.zeros([PACKED, WIDTH], tl.int32), mask=spare)


@triton.jit
def sender_begins_kernel(
    told,  # int64 [senders, ...], rows `stride` apart
    ends,
    begins,  # int32 [senders + 1, experts]
    senders,
    experts,
    stride,
    ALIGNMENT: tl.constexpr,
    SENDERS: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """One program finds where the rows of each sender's choices of each expert begin."""
    sender, expert = tl.arange(0, SENDERS)[:, None], tl.arange(0, EXPERTS)
    inside = (sender < senders) & (expert < experts)[None, :]
    count = tl.load(told + sender * stride + expert[None, :], mask=inside, other=0).to(tl.int32)
    total = tl.sum(count, 0)
    size = padded_size(total, expert < experts, ALIGNMENT)
    end = tl.cumsum(size, 0)
    tl.store(ends + expert, end, mask=expert < experts)
    begin = (end - size)[None, :] + tl.cumsum(count, 0) - count
    tl.store(begins + sender * experts + expert[None, :], begin, mask=inside)
    tl.store(begins + senders * experts + expert, end - size + total, mask=expert < experts)


@triton.jit
def place_sent_kernel(
    words,
    told,
    ends,
    begins,
    behind,  # int32 [experts], the last of which is `most`
    places,
    held,
    tokens,
    experts,
    senders,
    words_stride,
    told_stride,
    most,
    token_programs,
    OF_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,  # OF_TOKEN or more
    SENDERS: tl.constexpr,
    PACKED: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The first programs place the choices of a block of tokens each, the others write where an expert's rows pad."""
    program = tl.program_id(0)
    if program < token_programs:
        token = program * PACKED + tl.arange(0, PACKED)
        sender = tl.arange(0, SENDERS)
        sent = tl.load(told + sender * told_stride + experts + 1, mask=sender < senders, other=0).to(tl.int32)
        behind_sender = (token[:, None] >= tl.cumsum(sent, 0)[None, :]) & (sender < senders)[None, :]
        number = tl.arange(0, WIDTH)[None, :]
        inside = (token < tokens)[:, None] & (number < OF_TOKEN)
        place = token.to(tl.int64)[:, None] * words_stride + number
        own = tl.load(words + place, mask=inside, other=0)
        before = tl.load(words + place + OF_TOKEN, mask=inside, other=0)
        there = inside & (own >= 0) & (own < experts)
        begin = begins + tl.sum(behind_sender.to(tl.int32), 1)[:, None] * experts + own
        row = tl.load(begin, mask=there, other=0) + before
        choice = token[:, None] * OF_TOKEN + number
        tl.store(places + choice, tl.where(there, row, most).to(tl.int64), mask=inside)
        tl.store(held + row, choice, mask=there & (row < most))
    else:
        expert = program - token_programs
        end = tl.load(ends + expert)
        end = tl.where(expert == experts - 1, most, end)  # what is spare pads the last
        tl.store(behind + expert, end)
        for first in tl.range(tl.load(begins + senders * experts + expert), end, PADDED):
            padding = first + tl.arange(0, PADDED)
            tl.store(held + padding, tl.full([PADDED], -1, tl.int32), mask=padding < end)


def expert_rows_triton(owners: Tensor, experts: int, rows: int | None = None) -> ExpertRows:
    """Compute `expert_rows`, number for number."""
    choices, padded = len(owners), rows is None
    most = most_rows(choices, experts) if rows is None else rows
    blocks = ceil_div(choices, COUNTED)
    # the last of the counts: where experts start
    counts = owners.new_empty(blocks + 1, experts, dtype=torch.int32)
    starts = counts[blocks]
    ends, places = owners.new_empty(experts, dtype=torch.int32), owners.new_empty(choices, dtype=torch.int64)
    held = (owners.new_empty if padded else owners.new_zeros)(most, dtype=torch.int32)
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
        launch(place_kernel, programs, tensors, (choices, experts, most), num_warps=8, **sizes)
    return ExpertRows(ends, places, held)


def first_on_ranks_triton(chosen: Tensor, held: int, ranks: int) -> Tensor:
    """Compute `first_on_ranks`, number for number."""
    choices = chosen.numel()
    owners = chosen.new_empty(choices, dtype=torch.int32)
    if choices:
        sizes = (choices, held, ranks)
        launch(
            first_kernel, ceil_div(choices, PACKED), (chosen, owners), sizes, OF_TOKEN=chosen.shape[1], PACKED=PACKED
        )
    return owners


def pack_choices_triton(
    chosen: Tensor, weights: Tensor, choices: Tensor, places: Tensor, ends: Tensor, held: int, words: Tensor
) -> None:
    """Compute `pack_choices`, bit for bit."""
    of_token = chosen.shape[1]
    if words.numel():
        launch(
            pack_kernel,
            ceil_div(len(words), PACKED),
            (chosen, weights, choices, places, ends, words, words.view(torch.float32)),
            (len(words), held, words.stride(0), words.shape[1]),
            OF_TOKEN=of_token,
            WIDTH=max(4, block_over(of_token)),  # and what is spare
            PACKED=PACKED,
        )


def sender_begins_triton(told: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Compute `sender_begins`, number for number."""
    senders = len(told)
    ends, begins = told.new_empty(experts, dtype=torch.int32), told.new_empty(senders + 1, experts, dtype=torch.int32)
    launch(
        sender_begins_kernel,
        1,
        (told, ends, begins),
        (senders, experts, told.stride(0)),
        num_warps=8,
        ALIGNMENT=ALIGNMENT,
        SENDERS=block_over(senders),
        EXPERTS=block_over(experts),
    )
    return ends, begins


def place_sent_triton(
    words: Tensor, told: Tensor, ends: Tensor, begins: Tensor, of_token: int, counted: int
) -> ExpertRows:
    """Compute `place_sent`, number for number."""
    tokens, experts, senders = len(words), len(ends), len(told)
    most = most_counted_rows(counted, experts)
    behind, held = torch.empty_like(ends), ends.new_empty(most)
    places = ends.new_empty(tokens * of_token, dtype=torch.int64)
    programs = ceil_div(tokens, PACKED)
    launch(
        place_sent_kernel,
        programs + experts,
        (words, told, ends, begins, behind, places, held),
        (tokens, experts, senders, words.stride(0), told.stride(0), most, programs),
        OF_TOKEN=of_token,
        WIDTH=block_over(of_token),
        SENDERS=block_over(senders),
        PACKED=PACKED,
        PADDED=PADDED,
    )
    return ExpertRows(behind, places, held)


def count_choices_triton(
    owners: Tensor, numbers: Tensor, held: int, amaxes: Tensor | None = None, ends: Tensor | None = None
) -> None:
    """Compute `count_choices`; the bits of a NaN may be others."""
    ranks, columns = numbers.shape
    partials = 0 if amaxes is None else len(amaxes)
    experts = min(FEW, block_over(ranks * held))
    launch(
        tell_kernel,
        ceil_div(ranks * held, experts),
        (owners, numbers, numbers if amaxes is None else amaxes, numbers if ends is None else ends),
        (len(owners), ranks, columns, held, partials),
        num_warps=8,
        AT_ONCE=AT_ONCE,
        EXPERTS=experts,
        RANKS=block_over(ranks),
        PARTIALS_BLOCK=block_over(partials) if partials else 0,
        ENDS=ends is not None,
    )

"""The rows of experts on a GPU: three launches that sort by counting.

Each expert's choices are counted in blocks, the counts of the blocks before are summed, and a choice's place follows
from those before it in its own block. So the order is that of the choices, with no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.expert_rows import ExpertRows, most_rows
from fp8booster.kernels.launch import block_over, ceil_div, launch

COUNTED, PLACED, PART = 512, 128, 32
"""Choices of a block, of a program that places them, and of those that it compares at once. One program alone sums
over the blocks, so these are few."""

EXPERTS, BLOCKS = 128, 64  # of a tile


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
def begin_kernel(
    counts,  # becomes the choices of the same expert in the blocks before
    starts,  # int32 [experts]
    ends,
    held,  # the choice of each row: written where rows pad
    blocks,
    experts,
    most,
    ALIGNMENT: tl.constexpr,
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
        # the sum of the weight gradient over no rows would be refused
        size = tl.where(inside, tl.maximum((total + ALIGNMENT - 1) // ALIGNMENT, 1) * ALIGNMENT, 0)
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


def expert_rows_triton(owners: Tensor, experts: int) -> ExpertRows:
    """Compute `expert_rows`, number for number."""
    choices, most = len(owners), most_rows(len(owners), experts)
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
        ALIGNMENT=ALIGNMENT,
        BLOCKS=BLOCKS,
        EXPERTS=tile,
    )
    if choices:
        tensors = (owners, counts, starts, places, held)
        programs, sizes = ceil_div(choices, PLACED), {"COUNTED": COUNTED, "PLACED": PLACED, "PART": PART}
        launch(place_kernel, programs, tensors, (choices, experts), num_warps=8, **sizes)
    return ExpertRows(ends, places, held)

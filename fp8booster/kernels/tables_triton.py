"""One launch for many tensors: a table on the GPU says where each lies, so the host's work hardly grows with them.

A launch takes the host 10 to 20 us, and the GPU takes less for a small tensor. An entry of the table holds what
`launch_over` is given of tensors that belong together: addresses, sizes, their place in the list, and their first
program. Another table says whose each run of programs is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.device import current_stream, is_captured
from fp8booster.kernels.launch import ceil_div, launch

# programs in a row that work on one entry, so that the table of owners is as much shorter; the last of them may have
# nothing left to do
_RUN = 16
RUN = tl.constexpr(_RUN)

MOST_FIELDS = 10  # of an entry, with its place and its first program

_dtype = attrgetter("dtype")
_beyond_alignment = (ALIGNMENT - 1).__and__


@triton.jit
def own_entry(entries, owners, FIELDS: tl.constexpr):
    """Find this program's part of the work.

    Returns:
        (the entry, its place in the list, the program's number among those of the entry).
    """
    program = tl.program_id(0)
    # an owner for each run of programs, not for each program: the table stays small, and in a cache
    entry = entries + tl.load(owners + program // RUN).to(tl.int64) * (FIELDS + 2)
    return entry, tl.load(entry + FIELDS), program - tl.load(entry + FIELDS + 1).to(tl.int32)


@triton.jit
def own_pointer(entry, field, like, ALIGNED: tl.constexpr):
    """Load the address in a field of an entry, as a pointer of the type of another."""
    pointer = tl.load(entry + field).to(like.dtype)
    # what the compiler cannot see of a loaded number, and needs to move whole vectors
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def own_size(entry, field, ALIGNED: tl.constexpr):
    """Load the size in a field of an entry, int64."""
    size = tl.load(entry + field)
    return tl.multiple_of(size, 16) if ALIGNED else size


@triton.jit(do_not_specialize=[f"field{number}" for number in range(MOST_FIELDS)])
def fill_entry_kernel(
    entry, field0, field1, field2, field3, field4, field5, field6, field7, field8, field9, COUNT: tl.constexpr
):
    """Store the first COUNT fields."""
    tl.store(entry, field0)
    tl.store(entry + 1, field1)
    tl.store(entry + 2, field2)
    if COUNT > 3:
        tl.store(entry + 3, field3)
    if COUNT > 4:
        tl.store(entry + 4, field4)
    if COUNT > 5:
        tl.store(entry + 5, field5)
    if COUNT > 6:
        tl.store(entry + 6, field6)
    if COUNT > 7:
        tl.store(entry + 7, field7)
    if COUNT > 8:
        tl.store(entry + 8, field8)
    if COUNT > 9:
        tl.store(entry + 9, field9)


def launch_over(
    kernel: triton.JITFunction,
    tensors: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    programs: Callable[..., np.ndarray],
    others: tuple[Tensor, ...] = (),
    numbers: tuple[int | float, ...] = (),
    *,
    scalars: Sequence[Sequence[Tensor]] = (),
    moving: Sequence[Sequence[Tensor]] = (),
    **options: Any,
) -> None:
    """Launch a kernel once for all entries whose tensors have the same dtypes and are aligned alike.

    The kernel takes the table, the owners, a pointer of each kind, those that move last, for its type, then `others`,
    `numbers`, constants, and `ALIGNED`: whether the addresses of tensors and the sizes are multiples of 16. Fields of
    an entry are its tensors, its scalars and its sizes, in this order.

    Tables are remembered. A step mostly finds its tensors where those of the last one lay, and sends none anew.

    Args:
        kernel: begins with `own_entry`.
        tensors: of each kind, those of all entries. All lie on one device.
        sizes: of each kind, those of all entries.
        programs: tells from the sizes, int64 [entries] of each kind, how many each entry takes; one that takes none is
            left out. The same object at each call.
        others: tensors that all entries share.
        numbers, options: as of `launch`.
        scalars: as `tensors`, for those of one value.
        moving: as `tensors`, for those that lie elsewhere in each step. The kernel finds their addresses in `others`:
            a table that has them would be sent anew in each step.
    """
    kinds = [*tensors, *scalars]
    like = kinds[0][0]
    addresses = tuple(map(Tensor.data_ptr, chain.from_iterable(kinds)))
    beyond = tuple(map(_beyond_alignment, map(Tensor.data_ptr, chain.from_iterable(moving))))
    kinds += moving
    dtypes = tuple(map(_dtype, chain.from_iterable(kinds)))
    flat_sizes = tuple(chain.from_iterable(sizes))
    entries = addresses, beyond, dtypes, flat_sizes, programs, len(tensors), len(kinds), like.device
    # by the stream too: on another one the copy may not have ended, or its memory may be given to others
    parts = _parts(*entries, _captured_table) if is_captured(like) else _known_parts(entries, current_stream(like))
    for part in parts:
        pointers = (part.entries, part.owners, *[kind[part.first] for kind in kinds], *others)
        launch(kernel, part.programs, pointers, numbers, **options, ALIGNED=part.aligned)


class _Part(NamedTuple):
    """Entries of one launch."""

    first: int
    """The place of one in the list."""

    aligned: bool
    programs: int
    entries: Tensor
    owners: Tensor


MOST_TABLES = 2**10
"""Tables that are remembered, of a few kilobytes each: of all steps of a large model in turn, which may take one for
each of its parameters, as updates in backward do."""


@functools.lru_cache(maxsize=MOST_TABLES)
def _known_parts(entries: tuple, stream: int | None) -> list[_Part]:
    return _parts(*entries, _table)


def _parts(
    addresses: tuple[int, ...],
    beyond: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    sizes: tuple[int, ...],
    programs: Callable[..., np.ndarray],
    tensors: int,
    kinds: int,
    device: torch.device,
    table: Callable[[np.ndarray, tuple[int, ...], torch.device], tuple[Tensor, Tensor]],
) -> list[_Part]:
    """Divide entries into launches.

    Args:
        addresses, dtypes: of each kind, those of all entries; so are sizes. Those that move have dtypes alone.
        beyond: of those that move, the bytes by which they miss the alignment.
        sizes, programs: as in `launch_over`.
        tensors: the number of kinds of tensors, the first of all.
        kinds: the number of kinds, with those that move.
        device: of the tables.
        table: makes one.
    """
    count = len(dtypes) // kinds
    fields = np.array((*addresses, *sizes), dtype=np.int64).reshape(-1, count)
    of_sizes = fields[len(addresses) // count :]
    # one look at all: an address or size that is no multiple of 16 leaves a low bit
    looked_at = (*fields[:tensors], *of_sizes, *np.array(beyond, dtype=np.int64).reshape(-1, count))
    bits = np.bitwise_or.reduce(looked_at)
    counts = programs(*of_sizes)
    # dtypes and alignment are constants of a compiled kernel: as many launches as there are kinds, of many tensors each
    alike: dict[tuple, list[int]] = {}
    of_each = (dtypes[kind * count : (kind + 1) * count] for kind in range(kinds))
    for place, kind in enumerate(zip((bits % ALIGNMENT == 0).tolist(), *of_each, strict=True)):
        if counts[place] > 0:
            alike.setdefault(kind, []).append(place)
    parts = []
    for (aligned, *_), places in alike.items():
        runs = ceil_div(counts[places], _RUN)
        ends = np.cumsum(runs)
        rows = np.column_stack((fields[:, places].T, places, (ends - runs) * _RUN))
        made = table(rows, tuple(runs.tolist()), device)
        parts.append(_Part(places[0], aligned, int(ends[-1]) * _RUN, *made))
    return parts


def _table(rows: np.ndarray, runs: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the entries, int64, and the entry of each run, int32; the host does not wait.

    Args:
        rows: of each entry, its fields: int64.
        runs: of each entry.
        device: of both.
    """
    # pinned: from other memory the copy would make the host wait
    values = torch.empty(rows.shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    values.numpy()[:] = rows
    return values.to(device, non_blocking=True), _owners(runs, device)


@functools.lru_cache(maxsize=2**10)
def _owners(runs: tuple[int, ...], device: torch.device) -> Tensor:
    owners = torch.from_numpy(np.repeat(np.arange(len(runs), dtype=np.int32), runs))
    return owners.to(device)  # the host waits: other streams will read it


def _captured_table(rows: np.ndarray, runs: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the results of `_table` while a CUDA graph is captured."""
    entries = _captured_rows(rows.tolist(), device)
    starts = entries[:, -1] // _RUN
    owners = torch.searchsorted(starts, torch.arange(sum(runs), dtype=torch.int64, device=device), right=True) - 1
    return entries, owners.int()


def _captured_rows(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return numbers, int64 [rows, fields], in a capture: the graph holds them itself, as arguments of launches.

    A copy that is captured would read the host's memory at each replay, which has other content by then.

    Args:
        rows: of three fields to `MOST_FIELDS`.
        device: a GPU.
    """
    entries = torch.empty((len(rows), len(rows[0])), dtype=torch.int64, device=device)
    for entry, row in zip(entries.unbind(), rows, strict=True):
        fill_entry_kernel[(1,)](entry, *row, *[0] * (MOST_FIELDS - len(row)), COUNT=len(row))
    return entries

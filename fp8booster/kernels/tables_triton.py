"""One launch for many tensors: a table on the GPU says where each lies, so the host's work hardly grows with them.

A launch takes the host 10 to 20 us, and the GPU takes less for a small tensor. An entry of the table holds what
`launch_over` is given of tensors that belong together: addresses, sizes, their place in the list, and their first
program. Another table says whose each run of programs is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import reduce
from itertools import accumulate, chain
from operator import or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.launch import ceil_div, launch

_RUN = 16
RUN = tl.constexpr(_RUN)
"""Programs in a row that work on one entry. The last of them may have nothing left to do."""

_KEPT: list[Tensor] = []
"""What CUDA graphs copy tables from at each replay; nothing says when a graph is gone."""


@triton.jit
def own_entry(entries, owners, FIELDS: tl.constexpr):
    """Whose part this program does.

    Returns:
        (the entry, its place in the list, the program's number among those of the entry).
    """
    program = tl.program_id(0)
    entry = entries + tl.load(owners + program // RUN).to(tl.int64) * (FIELDS + 2)
    return entry, tl.load(entry + FIELDS), program - tl.load(entry + FIELDS + 1).to(tl.int32)


@triton.jit
def own_pointer(entry, field, like, ALIGNED: tl.constexpr):
    """The address in a field of an entry, as a pointer of the type of another."""
    pointer = tl.load(entry + field).to(like.dtype)
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def own_size(entry, field, ALIGNED: tl.constexpr):
    """The size in a field of an entry, int64."""
    size = tl.load(entry + field)
    return tl.multiple_of(size, 16) if ALIGNED else size


def launch_over(
    kernel: triton.JITFunction,
    tensors: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    programs: Sequence[int],
    others: tuple[Tensor, ...] = (),
    numbers: tuple[int | float, ...] = (),
    *,
    scalars: Sequence[Sequence[Tensor]] = (),
    **options: Any,
) -> None:
    """Launch a kernel once for all entries whose tensors have the same dtypes and are aligned alike.

    The kernel takes the table, the owners, a pointer of each kind, for its type, then `others`, `numbers`, constants,
    and `ALIGNED`: whether the addresses of tensors and the sizes are multiples of 16. Fields of an entry are its
    tensors, its scalars and its sizes, in this order.

    Args:
        kernel: begins with `own_entry`.
        tensors: of each kind, those of all entries. All lie on one device.
        sizes: of each kind, those of all entries.
        programs: how many each entry takes; one that takes none is left out.
        others: tensors that all entries share.
        numbers, options: as of `launch`.
        scalars: as `tensors`, for those of one value.
    """
    kinds = [*tensors, *scalars]
    dtypes = [[tensor.dtype for tensor in kind] for kind in kinds]
    addresses = [list(map(Tensor.data_ptr, kind)) for kind in kinds]
    bits = [reduce(or_, values) for values in zip(*addresses[: len(tensors)], *sizes, strict=True)]
    alike: dict[tuple, list[int]] = {}
    for place, (count, *kind) in enumerate(zip(programs, bits, *dtypes, strict=True)):
        if count > 0:
            alike.setdefault((kind[0] % ALIGNMENT == 0, *kind[1:]), []).append(place)
    for (aligned, *_), places in alike.items():
        first = places[0]
        device = kinds[0][first].device
        firsts, owners, total = _owners(device, tuple([programs[place] for place in places]))
        fields = [*([column[place] for place in places] for column in (*addresses, *sizes)), places, firsts]
        entries = _uploaded(list(chain.from_iterable(zip(*fields, strict=True))), torch.int64, device)
        pointers = (entries, owners, *(kind[first] for kind in kinds), *others)
        launch(kernel, total, pointers, numbers, **options, ALIGNED=aligned)


def _owners(device: torch.device, programs: tuple[int, ...]) -> tuple[list[int], Tensor, int]:
    """Each entry's first program; the entry of each run, int32 [runs] on the device; and how many programs there are.

    Args:
        device: of the tensors.
        programs: how many each entry takes.
    """
    return (_cached_owners if not _is_captured(device) else _cached_owners.__wrapped__)(device, programs)


@functools.lru_cache(maxsize=2**10)
def _cached_owners(device: torch.device, programs: tuple[int, ...]) -> tuple[list[int], Tensor, int]:
    runs = [ceil_div(count, _RUN) for count in programs]
    *firsts, total = accumulate(runs, initial=0)
    owners = _uploaded([entry for entry, count in enumerate(runs) for _ in range(count)], torch.int32, device)
    if device.type == "cuda" and not _is_captured(device):
        torch.cuda.current_stream(device).synchronize()  # other streams will read it
    return [run * _RUN for run in firsts], owners, total * _RUN


def _uploaded(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers on a device, ready in the order of its current stream; the host does not wait."""
    captured = _is_captured(device)
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda" and not captured)
    if captured:
        _KEPT.append(host)
    return host.to(device, non_blocking=True)


def _is_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()

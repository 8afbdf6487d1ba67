"""Count what a process sends: every collective called through `torch.distributed`, by name and element type."""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass
class Count:
    """Calls of one collective with one element type, in bytes of this process."""

    calls: int = 0
    payload: int = 0
    """Bytes of the tensors that this process hands in."""
    sent: int = 0
    """Bytes that leave this process under the algorithm that sends fewest (`bytes_sent`)."""


@dataclass
class Traffic:
    """Counts so far."""

    counts: dict[tuple[str, torch.dtype], Count] = field(default_factory=lambda: defaultdict(Count))
    """By collective and element type. FP8 data that is sent as bytes shows as uint8."""

    @property
    def calls(self) -> int:
        """Return the calls of all collectives."""
        return sum(count.calls for count in self.counts.values())

    @property
    def payload(self) -> int:
        return sum(count.payload for count in self.counts.values())

    @property
    def sent(self) -> int:
        return sum(count.sent for count in self.counts.values())

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each collective and element type, the largest sender first."""
        ordered = sorted(self.counts.items(), key=lambda item: -item[1].sent)
        return [
            {
                "collective": name,
                "dtype": str(dtype).removeprefix("torch."),
                "calls": count.calls,
                "payload_bytes": count.payload,
                "sent_bytes": count.sent,
            }
            for (name, dtype), count in ordered
        ]


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the collectives that are called while the context lasts, from every thread.

    Calls made as `torch.distributed.<name>` or through torch's own Python (object collectives, batched
    point-to-point) are seen. Not seen: a function imported by name before the context began, DDP's C++ reducer,
    functional collectives inside compiled graphs, and replays of CUDA graphs. Contexts may be nested; each counts.
    """
    traffic = Traffic()
    # by thread: while one is in a collective, others call theirs
    inside = threading.local()
    lock = threading.Lock()
    originals = {name: getattr(distributed_c10d, name) for name in _ARGUMENTS if hasattr(distributed_c10d, name)}
    for name, original in originals.items():
        wrapper = _counting(name, original, traffic, inside, lock)
        # torch's own module too: P2POp compares its function with that module's, and object collectives call it.
        for module in (dist, distributed_c10d):
            setattr(module, name, wrapper)
    try:
        yield traffic
    finally:
        for name, original in originals.items():
            for module in (dist, distributed_c10d):
                setattr(module, name, original)


_ARGUMENTS = {
    "all_reduce": (0, "tensor"),
    "all_reduce_coalesced": (0, "tensors"),
    "reduce": (0, "tensor"),
    "broadcast": (0, "tensor"),
    "reduce_scatter": (1, "input_list"),
    "reduce_scatter_tensor": (1, "input"),
    "reduce_scatter_single": (1, "input"),
    "all_gather": (1, "tensor"),
    "all_gather_into_tensor": (1, "input_tensor"),
    "all_gather_single": (1, "input_tensor"),
    "all_to_all": (1, "input_tensor_list"),
    "all_to_all_single": (1, "input"),
    "gather": (0, "tensor"),
    "scatter": (1, "scatter_list"),
    "send": (0, "tensor"),
    "isend": (0, "tensor"),
}
"""Position and name of the argument that each collective sends."""

_GATHERS = {"all_gather", "all_gather_into_tensor", "all_gather_single"}


def bytes_sent(name: str, payload: int, ranks: int) -> int:
    """Return the bytes that a rank sends when it hands `payload` bytes to a collective of `ranks`, the mean over ranks.

    They are those of the bandwidth-optimal algorithm (Patarasuk and Yuan, 2009, doi 10.1016/j.jpdc.2008.09.002): the
    payload in a point-to-point send, (ranks - 1) times it in an all-gather, 2 (ranks - 1) / ranks times in an
    all-reduce, (ranks - 1) / ranks times in every other one. Uneven all-to-all splits are counted as if even.
    """
    if name in ("send", "isend"):
        return payload
    if name in _GATHERS:
        return payload * (ranks - 1)
    passes = 2 if name.startswith("all_reduce") else 1
    return round(passes * payload * (ranks - 1) / ranks)


def _counting(
    name: str, original: Callable[..., Any], traffic: Traffic, inside: threading.local, lock: threading.Lock
) -> Callable[..., Any]:
    position, keyword = _ARGUMENTS[name]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(inside, "active", False):  # `send` calls `isend`: one message
            return original(*args, **kwargs)
        handed = args[position] if len(args) > position else kwargs.get(keyword)
        groups = (each for each in args if isinstance(each, dist.ProcessGroup))
        _add(traffic, lock, name, handed, kwargs.get("group") or next(groups, None))
        inside.active = True
        try:
            return original(*args, **kwargs)
        finally:
            inside.active = False

    return call


def _add(traffic: Traffic, lock: threading.Lock, name: str, handed: Any, group: dist.ProcessGroup | None) -> None:
    tensors = [handed] if isinstance(handed, torch.Tensor) else handed or []
    ranks = dist.get_world_size(group)
    with lock:
        for index, tensor in enumerate(tensors):
            count = traffic.counts[name, tensor.dtype]
            count.calls += index == 0
            count.payload += tensor.nbytes
            count.sent += bytes_sent(name, tensor.nbytes, ranks)

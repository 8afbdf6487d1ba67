"""Every collective of a step, call by call: those of more than 1 MiB send at most 0.52 of 16 bits' bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from fp8booster.comm.observer import observer
from fp8booster.monitor import traffic

MIB = 2**20
AT_MOST = 0.52


@dataclass(frozen=True)
class Call:
    """One row of `comm.statistics`, before it is added to others; bytes that leave this rank."""

    name: str
    raw: int
    wire: int
    reason: str | None


@dataclass
class Calls:
    """What was called."""

    counted: list[Call] = field(default_factory=list)
    """By `fp8booster.comm`."""

    seen: list[tuple[str, torch.dtype, int]] = field(default_factory=list)
    """By `torch.distributed` between two ranks or more: name, element type and bytes handed in."""


@contextmanager
def each_call() -> Iterator[Calls]:
    """The collectives that are called while the context lasts, one by one, or those that are counted together."""
    calls = Calls()
    count, add = observer._add, traffic._add

    def counting(name: str, number: int, raw: int, wire: int, reason: str | None, by_nodes: bool) -> None:
        calls.counted.append(Call(name, raw, wire, reason))
        count(name, number, raw, wire, reason, by_nodes)

    def adding(into: Any, lock: Any, name: str, handed: Any, group: Any) -> None:
        tensors = [handed] if isinstance(handed, torch.Tensor) else handed or []
        for dtype in {tensor.dtype for tensor in tensors} if dist.get_world_size(group) > 1 else ():
            calls.seen.append((name, dtype, sum(tensor.nbytes for tensor in tensors if tensor.dtype is dtype)))
        add(into, lock, name, handed, group)

    with patch.object(observer, "_add", counting), patch.object(traffic, "_add", adding), traffic.count_traffic():
        yield calls


def assert_large_collectives_are_compressed(step: Callable[[], Any]) -> None:
    """A step has collectives of more than 1 MiB; none sends more than it may, and none goes past `fp8booster.comm`.

    Between two ranks half of what is handed to a reduce-scatter or an all-to-all leaves a rank, and of what is gathered
    half is handed in: half a MiB of bytes in 16 bits is the least that 1 MiB sends.
    """
    with each_call() as calls:
        step()
    large = [call for call in calls.counted if call.raw > MIB / 2]
    assert large, calls
    too_many = [call for call in large if call.wire > AT_MOST * call.raw]
    assert not too_many, too_many
    in_full = [call for call in calls.seen if call[2] > MIB and call[1] is not torch.uint8]
    assert not in_full, in_full

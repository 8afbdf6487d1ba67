"""Numbers that a device computes and the host needs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch


class HostCopy:
    """Integers on their way to the host, which waits for them alone: what is queued behind them runs meanwhile.

    Args:
        numbers: on any device.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._copy, self._arrived = numbers, None
        if numbers.is_cuda:
            self._copy = numbers.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def part(self, number: int, columns: slice) -> HostCopy:
        """Return some columns of one matrix of several, [matrices, rows, columns]."""
        return _Part(self, number, columns)

    def tolist(self) -> list[Any]:
        """Return the numbers, once they are there, nested as the tensor's are."""
        return self._list

    @cached_property
    def _list(self) -> list[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


class _Part(HostCopy):
    """Some of the numbers of another copy, for which a GPU has nothing to do."""

    def __init__(self, whole: HostCopy, number: int, columns: slice) -> None:
        self._whole, self._number, self._columns = whole, number, columns

    @cached_property
    def _list(self) -> list[Any]:
        return [row[self._columns] for row in self._whole.tolist()[self._number]]


class Totals(HostCopy):
    """The sums of the columns of another copy, a matrix: [1, columns]."""

    def __init__(self, of: HostCopy) -> None:
        self._of = of

    @cached_property
    def _list(self) -> list[Any]:
        return [list(map(sum, zip(*self._of.tolist(), strict=True)))]

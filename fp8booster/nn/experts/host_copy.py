"""Numbers that a device computes and the host needs."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch


class HostCopy:
    """Integers on their way to the host, which waits for them alone: what is queued behind them runs meanwhile.

    Args:
        numbers: on any device.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self._numbers = numbers
        self._copy, self._arrived = numbers, None
        if numbers.is_cuda:
            self._copy = numbers.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    @property
    def on_device(self) -> torch.Tensor:
        """The numbers where they are computed."""
        return self._numbers

    def part(self, first: int, *shape: int) -> HostCopy:
        """Return those of one dimension from the first on, in a shape of their own."""
        return _Part(self, first, shape)

    def tolist(self) -> list[Any]:
        """Return the numbers, once they are there, nested as the tensor's are."""
        return self._list

    @cached_property
    def _list(self) -> list[Any]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()


class _Part(HostCopy):
    """Some of the numbers of another copy; the GPU has nothing to do for those that the host alone reads."""

    def __init__(self, whole: HostCopy, first: int, shape: tuple[int, ...]) -> None:
        self._whole, self._shape = whole, shape
        self._range = slice(first, first + math.prod(shape))
        self._view: torch.Tensor | None = None

    @property
    def on_device(self) -> torch.Tensor:
        """As `HostCopy.on_device`."""
        if self._view is None:
            self._view = self._whole.on_device[self._range].view(self._shape)
        return self._view

    @cached_property
    def _list(self) -> list[Any]:
        numbers = self._whole.tolist()[self._range]
        for size in self._shape[:0:-1]:
            numbers = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        return numbers

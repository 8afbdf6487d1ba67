"""Numbers that a device computes and the host needs."""

from __future__ import annotations

import math
from copy import copy
from typing import Any

import torch


class HostCopy:
    """Integers on their way to the host, which waits for them alone: what is queued behind them runs meanwhile.

    Args:
        numbers: on any device.
    """

    def __init__(self, numbers: torch.Tensor) -> None:
        self.on_device = numbers
        """The numbers where they are computed."""

        self._copy, self._arrived = numbers, None
        if numbers.is_cuda:
            self._copy = numbers.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def part(self, first: int, *shape: int) -> HostCopy:
        """Return those of one dimension from the first on, in a shape of their own."""
        part = copy(self)
        end = first + math.prod(shape)
        part.on_device, part._copy = (each[first:end].view(shape) for each in (self.on_device, self._copy))
        return part

    def tolist(self) -> list[Any]:
        """Return the numbers, once they are there, nested as the tensor's are."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()

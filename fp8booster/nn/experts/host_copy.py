"""Numbers that a device computes and the host needs."""

from __future__ import annotations

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

    def tolist(self) -> list[int]:
        """The numbers, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy.tolist()

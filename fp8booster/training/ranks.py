"""What the ranks of a run tell each other beside gradients: the loss, and that one of them was asked to stop."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist


class StopRequest:
    """Set by SIGTERM, as SLURM and torchrun send it, or SIGINT: save after the step at hand and end."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.wanted = True


def over_ranks(loss: torch.Tensor | None, stop: bool, device: torch.device) -> tuple[float, bool]:
    """The mean loss of the ranks that have one, and whether any rank wants to stop, in one reduction.

    A signal reaches ranks in different steps, and all must save the same one.
    """
    shared = torch.tensor([0.0, float(loss is not None), float(stop)], device=device)
    if loss is not None:
        shared[0] = loss
    dist.all_reduce(shared)
    total, losses, stops = shared.tolist()
    return total / losses, stops > 0

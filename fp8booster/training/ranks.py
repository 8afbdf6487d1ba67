"""The meeting of a run's ranks, and what they share besides gradients: the loss, and a request to stop."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist


def join_ranks(run: str, seed: int) -> None:
    """Start torch.distributed in a rank that a launcher has started, as `colossalai.launch_from_torch`.

    Args:
        run: tells runs apart whose ranks meet at one store, one after the other.
        seed: of torch, NumPy and Python.
    """
    import colossalai  # here: who stops a rank, or asks what stopped it, need not wait for it
    from colossalai.accelerator import get_accelerator

    store, rank, world_size = next(dist.rendezvous("env://"))
    accelerator = get_accelerator()
    if accelerator.support_set_device:
        # before the group: NCCL takes the device that is current
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(
        accelerator.communication_backend, store=dist.PrefixStore(run, store), rank=rank, world_size=world_size
    )
    colossalai.utils.set_seed(seed)
    torch._dynamo.config.optimize_ddp = world_size > 1


class StopRequest:
    """Set by SIGTERM, as SLURM and torchrun send it, or SIGINT: save after the step at hand and end."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            # a handler must not save by itself: ranks would be in the midst of a collective
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.wanted = True


def over_ranks(loss: torch.Tensor | None, stop: bool, device: torch.device) -> tuple[float, bool]:
    """Return the mean loss of the ranks that have one, and whether any rank wants to stop, in one reduction.

    A signal reaches ranks in different steps, and all must save the same one.
    """
    # stages of a pipeline but the last have no loss
    shared = torch.tensor([0.0, float(loss is not None), float(stop)], dtype=torch.float32, device=device)
    if loss is not None:
        shared[0] = loss
    dist.all_reduce(shared)
    # the one wait of a step for the device
    total, losses, stops = shared.tolist()
    return total / losses, stops > 0

"""Gradients of `DistributedDataParallel` in FP8.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fp8booster.comm.ddp_hook)

Unlike torch's own compression hooks, this one adds in FP32: a gradient is rounded twice, whatever the number of ranks.
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8booster.comm.collectives import all_reduce
from fp8booster.comm.encoding import DEFAULT, Encoding


@dataclass(frozen=True, kw_only=True)
class DDPState:
    """What `register_comm_hook` hands to `ddp_hook`."""

    group: dist.ProcessGroup | None = None
    """The group that the gradients are averaged over; None is the default group."""

    encoding: Encoding = DEFAULT
    """Format and scales on the wire."""

    min_bytes: int | None = None
    """The smallest bucket that is sent in FP8; None takes `threshold.MINIMUM_BYTES`."""


def ddp_hook(state: DDPState | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over the ranks, in FP8.

    Args:
        state: settings, or None for the defaults.
        bucket: DDP's, averaged in place. Larger buckets (`DistributedDataParallel(bucket_cap_mb=...)`) gain more: those
            under the threshold go uncompressed.
    """
    state = state or DDPState()
    work = all_reduce(
        bucket.buffer(),
        dist.ReduceOp.AVG,
        state.group,
        async_op=True,
        encoding=state.encoding,
        min_bytes=state.min_bytes,
    )
    return work.get_future().then(lambda future: future.value()[0])

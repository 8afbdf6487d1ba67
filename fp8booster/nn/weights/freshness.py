"""Whether what was made of a weight is still what the weight is.

It is while no optimizer has stepped, no collective has written to the weight's memory, and the weight is the same
tensor object with the same storage and version counter. The object counts because a weight that is computed anew at
each forward (spectral norm, `functional_call`) may lie where the last one lay. torch counts in-place changes of a
tensor, but not those made through `.data`, as optimizers over sharded or flat parameters do; the count of optimizer
steps sees these. A step that was captured into a CUDA graph runs no hook when it is replayed: from then on every
replay counts.

A change through `.data` between two steps, made by hand, is seen by none of these, nor is one that a replayed graph
makes without a step: call `forget_weights(model)` after it.
"""

from __future__ import annotations

import functools

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fp8booster.config import FP8Config
from fp8booster.kernels.device import current_stream
from fp8booster.nn.weights.collectives import forget_memory, watch_collectives, watch_memory
from fp8booster.optim.one_pass import COUNTS_STEPS


class _Changes:
    """Counts what may have changed any weight of this process."""

    count = 0

    @classmethod
    def add(cls) -> None:
        cls.count += 1
        forget_memory()  # of weights whose copies are all stale now


def _count_step(*_: object) -> None:
    """Runs after the step of every optimizer in this process."""
    _Changes.add()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _count_replays(torch.cuda.CUDAGraph)


def _count_replays(graph: type) -> None:
    """Let every replay of a class of CUDA graphs count as a step."""
    replay = graph.replay
    if hasattr(replay, _COUNTED):
        return

    @functools.wraps(replay)
    def counted(self: object) -> None:
        replay(self)
        _Changes.add()

    setattr(counted, _COUNTED, True)
    graph.replay = counted


_COUNTED = "_fp8booster_counted"

setattr(_count_step, COUNTS_STEPS, True)
register_optimizer_step_post_hook(_count_step)
watch_collectives(_Changes.add)


def state_of(weight: torch.Tensor, config: FP8Config) -> tuple:
    """What changes when a copy of the weight is no longer fresh; ask it when the copy is made."""
    watch_memory(weight)
    # another stream casts anew rather than read a copy that this one may not have finished
    return (
        weight.data_ptr(),
        weight._version,
        weight.dtype,
        _Changes.count,
        config,
        current_stream(weight),
    )

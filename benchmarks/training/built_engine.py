"""Define an engine that is built and can be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from fp8booster.training.batches import Replica

if TYPE_CHECKING:
    from fp8booster.training.boosted import BoostedModel

OPTIMIZER_RANGE = "optimizer step"
"""Name of the profiler's range around clipping and the optimizer's step."""

STEP_RANGE = "measured step"
"""Name of the profiler's range around the step that a profile is of."""


class Step(Protocol):
    """One optimizer step."""

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """Take `tokens`  [micro_batches * micro_batch, sequence]; return the mean loss  [], where this rank has it."""


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """A model on this rank, ready to train."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    """Whose groups hold the learning rate."""

    step: Step
    replica: Replica
    boosted: BoostedModel | None = None
    """What can be saved and goes on from there; None of engines without Booster."""
    unseen_bytes: int = 0
    """Bytes a step that this rank sends past `torch.distributed`'s Python functions."""

"""Buckets of gradients that ZeRO reduces together, and the parameters whose gradients fill them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from colossalai.zero.low_level.bookkeeping import BucketStore
from torch import nn

from fp8booster.colossal.zero.gathered_weights import GatheredWeight
from fp8booster.colossal.zero.gradient_store import AccumulatedGradients
from fp8booster.colossal.zero.noted_norms import note_norms
from fp8booster.nn.modules import change_class

NORM_BYTES = 2**29
"""Gradients whose norms are found at once, beside backward."""


@dataclass(eq=False)
class Trained:
    """A parameter of which this rank trains a part.

    Hashed by the object, for a tensor's hash is a call of Python's.
    """

    working: nn.Parameter

    master: torch.Tensor
    """This rank's shard."""

    group_id: int

    gathered: GatheredWeight | None
    """The FP8 memory that it is sent in; None: it is sent in the working dtype."""

    store: AccumulatedGradients | None = None
    """Of this rank's part of its gradient."""

    padding: int = 0
    """Values behind the parameter's, so that each rank has as many."""

    shares_blocks: bool = False
    """Its parts end within a block of values that share a scale."""

    is_expert: bool = False

    name: str = ""
    """In the model that is trained."""

    def __post_init__(self) -> None:
        self.place = self.group_id, id(self.working)
        """By which Colossal-AI's stores know its gradient."""
        self.values = self.working.numel() + self.padding
        self._message: tuple[torch.Tensor, torch.Tensor] | None = None

    def part_of(self, padded: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the working weight with its padding, a view."""
        if self._message is None or self._message[0] is not padded:
            part = padded.chunk(self.store.world_size)[self.store.local_rank]
            if self.gathered is not None:  # whose memory in 16 bits comes and goes
                return part
            self._message = padded, part  # made once: a view takes the host's time
        return self._message[1]


_SHARES_BLOCKS, _NBYTES = attrgetter("shares_blocks"), attrgetter("nbytes")


class GradientBucket(BucketStore):
    """Colossal-AI's bucket of one process group, of whose parameters gradients wait in `.grad`."""

    trained: list[Trained]

    values: int
    """Of the gradients, padding included."""

    without_norms: list[torch.Tensor]
    """Gradients that were reduced, and whose norms are yet to be found."""

    @classmethod
    def convert_in_place(cls, bucket: BucketStore) -> GradientBucket:
        """Turn an empty bucket into this class in place, and return it."""
        made = change_class(bucket, cls)
        made.reset_all()
        made.leave_norms()
        return made

    def reset_all(self) -> None:
        """Empty it."""
        self.trained, self.values = [], 0

    def num_elements_in_bucket(self) -> int:
        """As it is."""
        return self.values

    def find_norms(self, gradients: Sequence[torch.Tensor]) -> None:
        """Find the norms of reduced gradients, when those of many are to be found: a launch takes the host time."""
        self.without_norms += gradients
        self._bytes += sum(map(_NBYTES, gradients))
        if self._bytes >= NORM_BYTES:
            note_norms(self.without_norms)
            self.leave_norms()

    def leave_norms(self) -> None:
        """Leave the norms that are yet to be found to the step."""
        self.without_norms, self._bytes = [], 0

    def take_out(self) -> tuple[list[Trained], list[torch.Tensor]]:
        """Empty it; return its parameters and their gradients, flat and padded as the masters are.

        Those whose parts end within a block of values that share a scale come last: the others are encoded from where
        they lie. A parameter that backward reached again while its gradient waited here, as checkpointed segments make
        it do, has one gradient.
        """
        trained = sorted(dict.fromkeys(self.trained), key=_SHARES_BLOCKS)
        self.reset_all()
        gradients = []
        for each in trained:
            working = each.working
            gradient = working.grad
            if gradient.requires_grad:  # of a backward with a graph of its own; each view takes the host's time
                gradient = gradient.detach()
            gradient = gradient.flatten()
            gradients.append(nn.functional.pad(gradient, [0, each.padding]) if each.padding else gradient)
            # the list holds the memory now; a gradient left here would be added to by the next micro-batch
            working.grad = None
        return trained, gradients

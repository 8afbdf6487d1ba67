"""Batches: fixed pieces of the token file in an order that follows the seed, addressed by position alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The sequences of one optimizer step, and how they are divided among the model's replicas."""

    sequence: int
    """Tokens of one."""
    batch: int
    """Sequences of a micro-batch."""
    accumulate: int
    """Micro-batches."""
    replicas: int

    @property
    def sequences(self) -> int:
        """Sequences that all replicas take in one optimizer step."""
        return self.batch * self.accumulate * self.replicas

    @property
    def tokens(self) -> int:
        return self.sequences * self.sequence

    def require(self, tokens: int) -> None:
        """Raise ValueError when `tokens` are too few for one optimizer step."""
        if tokens // self.sequence < self.sequences:
            raise ValueError(
                f"The text has {tokens} tokens and one step takes {self.tokens} ({self.replicas} replicas x "
                f"{self.accumulate} micro-batches x {self.batch} sequences x {self.sequence} tokens); give more "
                "--data, or a smaller --batch, --sequence or --accumulate."
            )


@dataclass(frozen=True)
class Replica:
    """A rank's place among the model's replicas; ranks of one replica read the same tokens."""

    index: int
    count: int


class Batches:
    """The batches of one replica.

    The file is cut into sequences of equal length. Each epoch visits all of them once, in its own order; the next
    follows without a gap. A position counts the sequences that all replicas have taken since the start, so it is all
    that a resumed run needs, whatever their number.
    """

    def __init__(self, tokens: np.ndarray, step: GlobalBatch, replica: int, seed: int) -> None:
        """`tokens`  [count]. Raises ValueError when they are too few for one optimizer step."""
        step.require(len(tokens))
        self._step = step
        self._replica = replica
        self._seed = seed
        self._count = len(tokens) // step.sequence
        # a view of the mapped file: a step reads its own sequences alone
        self._pieces = tokens[: self._count * step.sequence].reshape(self._count, step.sequence)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def micro_batches(self, position: int) -> Iterator[torch.Tensor]:
        """Yield the `accumulate` micro-batches  [batch, sequence] (int64) of the step that begins at `position`."""
        step = self._step
        for micro in range(step.accumulate):
            # replicas take turns within a micro-batch, so a position alone tells what all of them have taken
            first = position + (micro * step.replicas + self._replica) * step.batch
            rows = [self._pieces[self._place(first + offset)] for offset in range(step.batch)]
            # ids on disk are unsigned, which torch's embeddings do not take
            yield torch.from_numpy(np.stack(rows).astype(np.int64))

    def _place(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        if epoch != self._epoch:  # an order that follows from seed and epoch: the position is all to be saved
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._count)
        return self._order[place]

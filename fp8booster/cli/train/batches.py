"""Batches: fixed pieces of the token file in an order that the seed decides, addressed by position alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one optimizer step is spread over the model's replicas: a process each, or several that share one."""

    sequence: int
    batch: int
    accumulate: int
    replicas: int

    @property
    def step_sequences(self) -> int:
        """Sequences that all replicas take in one optimizer step."""
        return self.batch * self.accumulate * self.replicas

    @property
    def step_tokens(self) -> int:
        return self.step_sequences * self.sequence

    def require(self, tokens: int) -> None:
        """Raises ValueError when `tokens` are too few for one optimizer step."""
        if tokens // self.sequence < self.step_sequences:
            raise ValueError(
                f"The text has {tokens} tokens and one step takes {self.step_tokens} ({self.replicas} replicas x "
                f"{self.accumulate} micro-batches x {self.batch} sequences x {self.sequence} tokens); give more "
                "--data, or a smaller --batch, --sequence or --accumulate."
            )


@dataclass(frozen=True)
class Replica:
    """Which of the model's replicas a rank belongs to; ranks of one replica read the same tokens."""

    index: int
    count: int


class Batches:
    """The batches of one replica.

    The file is cut into sequences of equal length; each epoch visits all of them once, in its own order, and the
    next epoch follows without a gap. A position counts the sequences that all replicas have taken since the start,
    so it is all that a resumed run needs, whatever their number.
    """

    def __init__(self, tokens: np.ndarray, layout: Layout, replica: int, seed: int) -> None:
        """`tokens`  [count]. Raises ValueError when they are too few for one optimizer step."""
        layout.require(len(tokens))
        self._layout = layout
        self._replica = replica
        self._seed = seed
        self._count = len(tokens) // layout.sequence
        self._pieces = tokens[: self._count * layout.sequence].reshape(self._count, layout.sequence)
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def micro_batches(self, position: int) -> Iterator[torch.Tensor]:
        """The `accumulate` micro-batches [batch, sequence] (int64) of the step that begins at `position`."""
        layout = self._layout
        for micro in range(layout.accumulate):
            first = position + (micro * layout.replicas + self._replica) * layout.batch
            rows = [self._pieces[self._place(first + offset)] for offset in range(layout.batch)]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))

    def _place(self, index: int) -> int:
        epoch, place = divmod(index, self._count)
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(self._count)
        return self._order[place]

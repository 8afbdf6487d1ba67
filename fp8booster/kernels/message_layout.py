"""The layout of an FP8 message: its pieces in one buffer of bytes.

    piece     [values: one byte each, padded to 16][inverse scales: float32, padded to 16 bytes]
    message   the pieces, one after the other, nothing between them

Each piece is whole in itself, so an all-to-all can send every rank its piece of one message and a receiver can decode
what it got from each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from fp8booster.kernels.alignment import aligned

SCALES_ALIGNMENT = 4
"""Scales come in multiples of this, so that the piece behind them begins at a multiple of 16 bytes."""


@dataclass(frozen=True, eq=False)  # launches and tables are found by it at each call, by identity
class MessageLayout:
    """Places of the pieces of a message.

    Piece p holds `counts[p]` values, which follow those of piece p - 1 in the tensor. A tensor that ends before its
    last pieces do is as if followed by zeros.
    """

    counts: tuple[int, ...]
    """Values in each piece."""

    block_size: int | None
    """Values that share a scale; None for one scale over the whole tensor, repeated in each piece."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(counts: tuple[int, ...], block_size: int | None) -> MessageLayout:
        """Return the layout, made once: calls repeat their sizes."""
        return MessageLayout(counts, block_size)

    @staticmethod
    def even(count: int, pieces: int, block_size: int | None) -> MessageLayout:
        """Return the layout of pieces of one size."""
        return MessageLayout.of((count,) * pieces, block_size)

    @cached_property
    def is_even(self) -> bool:
        """Tell whether the pieces have one size."""
        return len(set(self.counts)) == 1

    @cached_property
    def piece(self) -> MessageLayout:
        """Return the layout of the first piece alone, which of even pieces is that of any."""
        return MessageLayout.of(self.counts[:1], self.block_size)

    def payload_bytes(self, count: int) -> int:
        """Return the bytes of the values of a piece, padding included."""
        return aligned(count)

    def scale_count(self, count: int) -> int:
        """Count the scales of a piece, padding included."""
        blocks = min(count, 1) if self.block_size is None else math.ceil(count / self.block_size)
        return math.ceil(blocks / SCALES_ALIGNMENT) * SCALES_ALIGNMENT

    def piece_bytes(self, count: int) -> int:
        """Return the bytes of a piece of `count` values."""
        return self.payload_bytes(count) + 4 * self.scale_count(count)

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each piece: the split sizes of an all-to-all."""
        return [self.piece_bytes(count) for count in self.counts]

    @cached_property
    def starts(self) -> list[int]:
        """The first value of each piece in the tensor."""
        return [0, *accumulate(self.counts)][:-1]

    @cached_property
    def offsets(self) -> list[int]:
        """The first byte of each piece in the message."""
        return [0, *accumulate(self.sizes)][:-1]

    @cached_property
    def bytes(self) -> int:
        """Bytes of the message."""
        return sum(self.sizes)


def side_by_side(tensors: Sequence[Tensor], pieces: int) -> Tensor:
    """Return [N]: the first of `pieces` even parts of each tensor, then the second of each, and so on."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(pieces, -1) for tensor in tensors], dim=1).view(-1)

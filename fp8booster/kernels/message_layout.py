"""The layout of an FP8 message: its pieces in one buffer of bytes.

    piece     [values: one byte each, padded to 16][inverse scales: float32, padded to 16 bytes]
    message   the pieces, all of one size, one after the other, nothing between them

Each piece is whole in itself, so an all-to-all can send every rank its pieces of one message, and a receiver can decode
what it got from each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from fp8booster.kernels.alignment import aligned

SCALES_ALIGNMENT = 4
"""Scales come in multiples of this, so that the piece behind them begins at a multiple of 16 bytes."""


@dataclass(frozen=True, eq=False)  # launches are found by it at each call, by identity
class MessageLayout:
    """Places of the pieces of a message.

    Piece p holds the `count` values behind those of piece p - 1 in the tensor. A tensor that ends before its last
    pieces do is as if followed by zeros.
    """

    count: int
    """Values in each piece."""

    pieces: int

    block_size: int | None
    """Values that share a scale; None for one scale over the whole tensor, repeated in each piece."""

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(count: int, pieces: int, block_size: int | None) -> MessageLayout:
        """Return the layout, made once: calls repeat their sizes."""
        return MessageLayout(count, pieces, block_size)

    @cached_property
    def piece(self) -> MessageLayout:
        """Return the layout of one piece alone."""
        return MessageLayout.of(self.count, 1, self.block_size)

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes of the values of a piece, padding included."""
        return aligned(self.count)

    @cached_property
    def scale_count(self) -> int:
        """Scales of a piece, padding included."""
        blocks = min(self.count, 1) if self.block_size is None else math.ceil(self.count / self.block_size)
        return math.ceil(blocks / SCALES_ALIGNMENT) * SCALES_ALIGNMENT

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of a piece."""
        return self.payload_bytes + 4 * self.scale_count

    @cached_property
    def bytes(self) -> int:
        """Bytes of the message."""
        return self.pieces * self.piece_bytes


def side_by_side(tensors: Sequence[Tensor], pieces: int) -> Tensor:
    """Return [N]: the first of `pieces` even parts of each tensor, then the second of each, and so on."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(pieces, -1) for tensor in tensors], dim=1).view(-1)

"""The layout of an FP8 message: its pieces in one buffer of bytes.

    piece     [values: one byte each, padded to 16][inverse scales: float32, padded to 16 bytes]
    message   the pieces, all of one size, one after the other, nothing between them

Each piece is whole in itself, so an all-to-all can send every rank its pieces of one message, and a receiver can decode
what it got from each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT

SCALES_ALIGNMENT = 4
"""Scales come in multiples of this, so that the piece behind them begins at a multiple of 16 bytes."""


class MessageLayout:
    """Places of the pieces of a message.

    Piece p holds the `count` values behind those of piece p - 1 in the tensor. A tensor that ends before its last
    pieces do is as if followed by zeros.

    Args:
        count: values in each piece.
        pieces: how many.
        block_size: values that share a scale; None for one scale over the whole tensor, repeated in each piece.
    """

    def __init__(self, count: int, pieces: int, block_size: int | None) -> None:
        # all of it at once: the host makes one for each message of rows, whose number is another each time
        self.count, self.pieces, self.block_size = count, pieces, block_size
        self.payload_bytes = -(-count // ALIGNMENT) * ALIGNMENT
        """Bytes of the values of a piece, padding included."""

        scales = min(count, 1) if block_size is None else -(-count // block_size)
        self.scale_count = -(-scales // SCALES_ALIGNMENT) * SCALES_ALIGNMENT
        """Scales of a piece, padding included."""

        self.piece_bytes = self.payload_bytes + 4 * self.scale_count
        self.bytes = pieces * self.piece_bytes

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(count: int, pieces: int, block_size: int | None) -> MessageLayout:
        """Return the layout, made once: launches are found by it, and calls repeat their sizes."""
        return MessageLayout(count, pieces, block_size)

    @property
    def piece(self) -> MessageLayout:
        """Return the layout of one piece alone."""
        return MessageLayout.of(self.count, 1, self.block_size)


def side_by_side(tensors: Sequence[Tensor], pieces: int) -> Tensor:
    """Return [N]: the first of `pieces` even parts of each tensor, then the second of each, and so on."""
    if len(tensors) == 1:
        return tensors[0].reshape(-1)
    return torch.cat([tensor.reshape(pieces, -1) for tensor in tensors], dim=1).view(-1)

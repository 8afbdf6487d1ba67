"""Rows of tokens between the ranks that hold experts, encoded in FP8 where that gains, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8booster.comm.encoding import Encoding
from fp8booster.comm.rows import decode_rows, encode_rows, send_rows, sum_rows, why_not_encoded
from fp8booster.nn.experts.routing import Routes, sum_of_rows
from fp8booster.nn.linear.functional import linear_map, once_differentiable

Send = Callable[[torch.Tensor], torch.Tensor]


class _SentWith(torch.autograd.Function):
    """Sends rows of any dtype with words behind them, and their gradients back.

    Nobody else sees what is between: words may be NaN as numbers, which a sum or a search for NaN would change or
    report, and a row of 16 bits need not end where a word can begin.
    """

    @staticmethod
    def forward(
        ctx: Any, message: torch.Tensor, words: torch.Tensor, send: Send, back: Send
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.back = back
        return _exchanged(message, words, send)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, message: torch.Tensor, words: torch.Tensor) -> tuple:
        return *_exchanged(message, words, ctx.back), None, None


def _exchanged(message: torch.Tensor, words: torch.Tensor, send: Send) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [each.contiguous().view(torch.uint8) for each in (message, words)]
    joined = torch.cat(parts, 1).view(message.dtype)  # as who counts what is sent knows it
    arrived = send(joined).view(torch.uint8).tensor_split([parts[0].shape[1]], 1)
    # copies: a slice of one row is contiguous for torch, and may begin where no number can
    made = [each.clone(memory_format=torch.contiguous_format) for each in arrived]
    return made[0].view(message.dtype), made[1].view(words.dtype)


class Wire(NamedTuple):
    """Carries rows between the ranks that hold experts, and their gradients back, encoded too."""

    group: dist.ProcessGroup
    width: int
    """Values of a row."""

    dtype: torch.dtype
    """Type of rows, and of their gradients."""

    encoding: Encoding | None
    """Encodes rows and their gradients; None: they are sent as they are."""

    why_not: str | None
    """Tells why they are, where an encoding was asked for."""

    @classmethod
    def of(cls, tokens: torch.Tensor, group: dist.ProcessGroup, encoding: Encoding | None) -> Wire:
        """Return how rows of tokens [T, H] go: encoded where that can be and gains."""
        reason = None if encoding is None else why_not_encoded(tokens, group, encoding)
        return cls(group, tokens.shape[1], tokens.dtype, encoding if reason is None else None, reason)

    def encoded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [R, H] as what is sent, [R, W]; differentiable."""
        return rows if self.encoding is None else linear_map(rows, self.encode, self.decode)

    def decoded(self, message: torch.Tensor) -> torch.Tensor:
        """Return what came, [R, W], as rows [R, H]; differentiable."""
        return message if self.encoding is None else linear_map(message, self.decode, self.encode)

    def spread(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return tokens [T, H] as a message of their rows, [R, W]; differentiable."""
        return linear_map(tokens, lambda tokens: self.rows_of(tokens, routes), lambda rows: self.sum_of(rows, routes))

    def summed(self, message: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return the sum of each token's rows in a message, [T, H]; differentiable."""
        return linear_map(
            message, lambda message: self.sum_of(message, routes), lambda gradient: self.rows_of(gradient, routes)
        )

    def exchanged(self, message: torch.Tensor, sent: list[int], received: list[int], room: int = 0) -> torch.Tensor:
        """Send each rank its part of a message; differentiable.

        Args:
            message: [sum(sent) or more, W], the rows for each rank one after the other.
            sent, received: rows for and from each rank; may be zero.
            room: as in `send_rows`.

        Returns:
            [sum(received) or `room`, W], those from each rank one after the other.
        """
        rows = len(message)
        return linear_map(
            message,
            lambda message: self.start(message, sent, received, room, async_op=False)(),
            lambda gradient: self.start(gradient, received, sent, rows, async_op=False)(),
        )

    def exchanged_with(
        self, message: torch.Tensor, words: torch.Tensor, sent: list[int], received: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Send a message as `exchanged` does, and with each row words, float32 [R, N]; differentiable by both."""
        rows = len(message)
        return _SentWith.apply(
            message,
            words,
            lambda joined: self.start(joined, sent, received, async_op=False)(),
            lambda joined: self.start(joined, received, sent, rows, async_op=False)(),
        )

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Encode as `encoded` does; not differentiable."""
        return rows if self.encoding is None else encode_rows(rows.contiguous(), self.encoding)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """Decode as `decoded` does; not differentiable."""
        return message if self.encoding is None else decode_rows(message, self.width, self.dtype, self.encoding)

    def rows_of(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return a message as `spread` does; not differentiable."""
        return self.encode(tokens).index_select(0, routes.tokens)  # a token is encoded once

    def sum_of(self, message: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return sums as `summed` does; not differentiable."""
        if self.encoding is None:
            return sum_of_rows(message, routes)
        return sum_rows(message.contiguous(), routes.places, self.width, self.dtype, self.encoding)

    def start(
        self, message: torch.Tensor, sent: list[int], received: list[int], room: int = 0, async_op: bool = True
    ) -> Callable[[], torch.Tensor]:
        """Begin to send as `exchanged` does, and return what waits for what comes; not differentiable."""
        payload = None if self.encoding is None else sum(sent) * self.width * self.dtype.itemsize
        rows, form, why_not = message.contiguous(), self.encoding, self.why_not
        return send_rows(
            rows, sent, received, self.group, form=form, payload=payload, why_not=why_not, room=room, async_op=async_op
        )

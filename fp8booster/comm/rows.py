"""Rows that ranks send each other, each as many as it likes: encoded one by one, and decoded where they are read.

    rows [R, H] -- encode --> message [R, W] -- send --> message [R', W] -- decode --> rows [R', H]

A row of a message stands for itself, so some of its rows can be read without the others, and a rank's are whole rows.
Rows that a cast has made FP8 before are sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster.comm.encoding import SMALLEST_BLOCK, Encoding
from fp8booster.comm.observer import observer
from fp8booster.comm.threshold import uncompressed_reason
from fp8booster.kernels import message_rows
from fp8booster.kernels.message_layout import MessageLayout

_COLLECTIVE = "all_to_all_single"
"""Its name, and the row of `statistics`."""

WORD = 4
"""Bytes of a word of a message. It is of float32: so autograd carries the message of a gradient as the gradient of a
message. A word is NaN only where a value or a scale is."""


def _layout(width: int, rows: int, encoding: Encoding) -> MessageLayout:
    """Return the layout of rows of `width` values, each of which has scales of its own."""
    whole = max(SMALLEST_BLOCK, 1 << (width - 1).bit_length())
    return MessageLayout.of(width, rows, encoding.block_size or whole)


def why_not_encoded(rows: Tensor, group: dist.ProcessGroup, encoding: Encoding) -> str | None:
    """Return why rows like these, [R, H], go to the ranks of a group as they are; None: they are encoded."""
    reason = uncompressed_reason(_COLLECTIVE, rows, rows.nbytes, group, None, alike=False)
    width = rows.shape[1]
    # each row has scales and padding of its own
    is_longer = _layout(width, 1, encoding).bytes >= width * rows.element_size()
    return "small" if reason is None and is_longer else reason


def encode_rows(rows: Tensor, encoding: Encoding, purpose: str = _COLLECTIVE) -> Tensor:
    """Return rows as a message, float32 [R, W] by its bytes.

    Args:
        rows: [R, H], contiguous, BF16, FP16 or FP32.
        encoding: format and scales; the blocks are of one row each.
        purpose: as in `Encoding.encode`.
    """
    count, width = rows.shape
    layout = _layout(width, count, encoding)
    message = torch.empty(count, layout.piece_bytes // WORD, dtype=torch.float32, device=rows.device)
    encoding.encode(rows.view(-1), _bytes(message), layout, purpose)
    return message


def decode_rows(message: Tensor, width: int, dtype: torch.dtype, encoding: Encoding) -> Tensor:
    """Return the rows of a message, [R, width].

    Args:
        message: of rows that `encode_rows` made, in any order.
        width, dtype: of the rows.
        encoding: as there.
    """
    rows = torch.empty(len(message), width, dtype=dtype, device=message.device)
    encoding.decode(_bytes(message), rows.view(-1), _layout(width, len(message), encoding))
    return rows


def sum_rows(message: Tensor, places: Tensor, width: int, dtype: torch.dtype, encoding: Encoding) -> Tensor:
    """Return the sum of each token's rows in a message, [T, width] (`message_rows.sum_message`)."""
    layout = _layout(width, len(message), encoding)
    return message_rows.sum_message(_bytes(message), places, layout, encoding.format, dtype)


def _bytes(message: Tensor) -> Tensor:
    return message.view(-1).view(torch.uint8)


def send_rows(
    rows: Tensor,
    sent: list[int],
    received: list[int],
    group: dist.ProcessGroup,
    *,
    form: object,
    payload: int | None = None,
    why_not: str | None = None,
    room: int = 0,
    async_op: bool = False,
) -> Callable[[], Tensor]:
    """Send each rank its rows, and return what waits for those that come for this one.

    Args:
        rows: [sum(sent) or more, W], contiguous, those for each rank one after the other.
        sent, received: rows for and from each rank; may be zero.
        group: the ranks.
        form: what ranks must have alike besides: an encoding, or the strategy of a cast.
        payload: bytes of the rows in high precision, with which those sent are compared; None: they are in it.
        why_not: the reason why they are, for `statistics`; None: it is as the caller was told.
        room: give so many rows at least, zeros behind those that came.
        async_op: let a GPU compute meanwhile.

    Returns:
        What waits for [sum(received) or `room`, W].

    Raises:
        ValueError: the ranks do not agree on size, dtype or form.
    """
    # of an empty part nothing arrives
    what = {"width": rows.shape[1], "dtype": rows.dtype, "form": form}
    observer.enter(group, _COLLECTIVE, on_arrival=False, what=what)
    rows = rows if len(rows) == sum(sent) else rows[: sum(sent)]
    # no backend sends all FP8 formats
    given = rows if payload is None else rows.view(torch.uint8)
    output = torch.empty(max(sum(received), room), given.shape[1], dtype=given.dtype, device=rows.device)
    arriving = output
    if len(output) > sum(received):
        arriving = output[: sum(received)]
        output[len(arriving) :].zero_()  # who looks for NaN among gradients sees all of them
    work = dist.all_to_all_single(arriving, given, received, sent, group, async_op)
    dtype = rows.dtype  # what is sent is let go once it has arrived
    # behind the launch, for which a GPU waits
    if payload is not None:
        observer.count_encoded(_COLLECTIVE, group.size(), payload, {_COLLECTIVE: rows.nbytes})
    elif why_not is not None:
        observer.count_plain(_COLLECTIVE, group.size(), rows.nbytes, why_not)

    def arrived() -> Tensor:
        if work is not None:
            work.wait()
        return output.view(dtype)

    return arrived

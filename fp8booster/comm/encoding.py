"""The form of values on the wire: FP8 with one scale a block, scales and values in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels import block_cast
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.scaling.checks import require_switch

SMALLEST_BLOCK = 32
LARGEST_BLOCK = 4096


Observer = Callable[[str, Callable[[], Tensor | Sequence[Tensor]], Tensor, MessageLayout, torch.dtype], None]
"""Sees a cast for a message: its purpose, a function that gives the values, the message, its layout and format."""

observers: list[Observer] = []
"""Called after each cast to a message."""


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """Format and scales of the values on the wire. All ranks of a call must use the same.

    Raises:
        ValueError: a field has a value that is not allowed; the message says which are.
    """

    format: torch.dtype = formats.E4M3
    """torch.float8_e4m3fn or torch.float8_e5m2. With a scale for each block E5M2's range is not needed, and E4M3 has
    half its rounding error."""

    block_size: int | None = 256
    """Values that share a scale, a power of two from 32 to 4096; None for one scale over the whole tensor, or over each
    rank's part where parts are uneven, which needs a pass of its own to find, and over each row that goes to experts.
    Each scale adds four bytes: 1.6 % at 256 values, 0.4 % at 1024."""

    power_of_two: bool = False
    """Round scales down to powers of two: exact to apply and undo, at a cost of up to one bit of range."""

    automatic_scaling: bool = False
    """Scale the gradients that ZeRO reduces by FP8-LM's automatic scaling (`comm.automatic_scaling`), which adds them
    in FP8; everything else is sent by blocks."""

    def __post_init__(self) -> None:
        formats.require_format(self.format)
        require_switch(self, "power_of_two", "automatic_scaling")
        size = self.block_size
        # by the type itself: True is an int too
        is_size = type(size) is int and SMALLEST_BLOCK <= size <= LARGEST_BLOCK and size & (size - 1) == 0
        if size is not None and not is_size:
            raise ValueError(
                f"Encoding.block_size is {size!r}; use a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}, or "
                "None for one scale a tensor"
            )

    def layout(self, count: int, pieces: int = 1) -> MessageLayout:
        """Return the layout of `pieces` pieces of `count` values each."""
        return MessageLayout.of(count, pieces, self.block_size)

    def encode(
        self, values: Tensor | Sequence[Tensor], message: Tensor, layout: MessageLayout, purpose: str = "send"
    ) -> None:
        """Cast values and write them with their scales to a message (`block_cast.encode`).

        Args:
            values, message, layout: as in `block_cast.encode`.
            purpose: the collective that sends the message, for observers.
        """
        block_cast.encode(values, message, layout, self.format, self.power_of_two)
        # as functions: observers that sample no values in this step cause no work
        for observe in observers:
            observe(purpose, lambda: values, message, layout, self.format)

    def decode(self, message: Tensor, values: Tensor, layout: MessageLayout) -> None:
        """Write the values of a message to a tensor (`block_cast.decode`)."""
        block_cast.decode(message, values, layout, self.format)

    def decode_sum(self, messages: Tensor, values: Tensor, layout: MessageLayout, factor: float = 1.0) -> None:
        """Add the values of all ranks' messages in FP32, times a factor (`block_cast.decode_sum`)."""
        block_cast.decode_sum(messages, values, layout, self.format, factor)

    def decode_sum_encode(
        self, messages: Tensor, message: Tensor, layout: MessageLayout, factor: float = 1.0, purpose: str = "send"
    ) -> None:
        """Add as `decode_sum`, and encode the sum in a message again (`block_cast.decode_sum_encode`)."""
        block_cast.decode_sum_encode(messages, message, layout, self.format, self.power_of_two, factor)

        def sums() -> Tensor:
            # with a scale a block, one kernel on a GPU adds and casts, and writes no sums: who looks makes them again
            found = torch.empty(layout.count, dtype=torch.float32, device=message.device)
            self.decode_sum(messages, found, layout, factor)
            return found

        for observe in observers:
            observe(f"{purpose} sums", sums, message, layout.piece, self.format)


DEFAULT = Encoding()
"""The encoding of every function that is given no other."""


class Options(TypedDict, total=False):
    """Arguments of collectives and sends besides torch's. All ranks of a call must give the same."""

    encoding: Encoding
    """Format and scales; `DEFAULT` where it is not given."""

    min_bytes: int | None
    """The payload, in bytes of the uncompressed call's larger side, from which a call is sent in FP8; where it is None
    or not given, `threshold.MINIMUM_BYTES` has it."""


class ReductionOptions(Options, total=False):
    """Arguments of reductions besides torch's."""

    of: tuple[str, ...]
    """Whose values these are, as by the names of parameters: ranks that have as many values of others differ."""


def settings(
    encoding: Encoding = DEFAULT, min_bytes: int | None = None, of: tuple[str, ...] = ()
) -> tuple[Encoding, int | None, tuple[str, ...]]:
    """Return options with their defaults. Raises TypeError for an encoding that is none."""
    if not isinstance(encoding, Encoding):
        raise TypeError(f"encoding is {encoding!r}; give an fp8booster.comm.Encoding, as Encoding(format=...)")
    return encoding, min_bytes, of


class Parts(NamedTuple):
    """Divides a message into what is for each rank of a group, or from each."""

    tensors: Sequence[Tensor]
    """One dimension, contiguous; their values follow each other in the message."""

    layouts: Sequence[MessageLayout]
    """Layouts of the tensors, one each."""

    sizes: list[int] | None
    """Bytes for each rank; None: all are of one size."""

    bytes: int
    """Length of the message."""

    @classmethod
    def even(cls, tensor: Tensor, ranks: int, encoding: Encoding) -> Parts:
        """Return as many values of a tensor for each rank."""
        layout = encoding.layout(tensor.numel() // ranks, ranks)
        return cls([tensor], [layout], None, layout.bytes)

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor], encoding: Encoding) -> Parts:
        """Return a tensor for each rank."""
        layouts = [encoding.layout(tensor.numel()) for tensor in tensors]
        sizes = [layout.bytes for layout in layouts]
        return cls(tensors, layouts, sizes, sum(sizes))

    def encode(self, message: Tensor, encoding: Encoding, purpose: str) -> None:
        """Write the message."""
        for tensor, layout, part in zip(self.tensors, self.layouts, self._of_tensors(message), strict=True):
            encoding.encode(tensor, part, layout, purpose)

    def decode(self, message: Tensor, encoding: Encoding) -> None:
        """Write what the message has to the tensors."""
        for tensor, layout, part in zip(self.tensors, self.layouts, self._of_tensors(message), strict=True):
            encoding.decode(part, tensor, layout)

    def _of_tensors(self, message: Tensor) -> Sequence[Tensor]:
        """Return the part of a message that each tensor has."""
        return [message] if len(self.layouts) == 1 else message.split([layout.bytes for layout in self.layouts])

"""FP8 messages: values cast in blocks, with the inverse scales that undo the cast, as `message_layout` lays them.

`encode`, `encode_parts`, `decode`, `decode_sum` and `decode_sum_encode` are the entries; the
`*_reference` functions define what they compute, run on every device and are what tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import torch
import torch.nn.functional as F

from fp8booster import scaling
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.device import why_no_fp8
from fp8booster.kernels.message_layout import Message, MessageLayout, side_by_side


def encode(
    values: torch.Tensor, message: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, power_of_two: bool = False
) -> None:
    """Cast values to FP8 with real-time scales, into a message.

    Args:
        values: [N], contiguous, BF16, FP16 or FP32; N may be less than the layout's pieces hold.
        message: uint8 [layout.bytes], at a multiple of 16 bytes; all of it is written.
        layout: the pieces.
        dtype: the FP8 format.
        power_of_two: see `scaling.scale_of`.

    A block with an infinity or a NaN arrives as NaN: its inverse scale is.
    """
    _implementation(values).encode(values, message, layout, dtype, power_of_two)


def encode_parts(
    tensors: Sequence[torch.Tensor],
    message: torch.Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> None:
    """`encode` of several tensors side by side, without a copy of those whose parts are whole blocks.

    Args:
        tensors: contiguous, of one dtype. Each is divided evenly among the pieces, which hold its parts in this order.
        message, dtype, power_of_two: as in `encode`.
        layout: even pieces.
    """
    _implementation(message).encode_parts(tensors, message, layout, dtype, power_of_two)


def decode(message: Message, values: torch.Tensor, layout: MessageLayout, dtype: torch.dtype) -> None:
    """Write the values of a message that `encode` made, each rounded once to the dtype of `values`.

    Args:
        message: the pieces.
        values: [N], contiguous; N may be less than the layout's pieces hold.
        layout, dtype: as in `encode`.
    """
    implementation = _implementation(values)
    implementation.decode(message, values, layout, dtype)
    if implementation is not Reference:
        torch.autograd.graph.increment_version(values)


def decode_sum(
    messages: Message, values: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float = 1.0
) -> None:
    """Add the pieces of a message in FP32, first to last, each times `factor`.

    Args:
        messages: even pieces of N values.
        values: [N], contiguous.
        layout, dtype: as in `encode`.
        factor: 1 for a sum, 1 / pieces for a mean. It multiplies the FP8 values, so that no sum of what has a finite
            mean overflows.
    """
    implementation = _implementation(values)
    implementation.decode_sum(messages, values, layout, dtype, factor)
    if implementation is not Reference:
        torch.autograd.graph.increment_version(values)


def decode_sum_encode(
    messages: Message,
    message: torch.Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
    factor: float = 1.0,
) -> None:
    """What `decode_sum` gives in FP32, cast again into a message of one piece.

    Args:
        messages, layout, dtype, factor: as in `decode_sum`.
        message: uint8 [one piece's bytes].
        power_of_two: see `scaling.scale_of`.
    """
    if layout.block_size is None:  # the scale needs the whole sum first
        total = torch.empty(layout.counts[0], dtype=torch.float32, device=message.device)
        decode_sum(messages, total, layout, dtype, factor)
        encode(total, message, MessageLayout.of(layout.counts[:1], None), dtype, power_of_two)
    else:
        _implementation(message).decode_sum_encode(messages, message, layout, dtype, power_of_two, factor)


class Reference:
    """The four functions in torch."""

    @staticmethod
    def encode(
        values: torch.Tensor, message: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, power_of_two: bool
    ) -> None:
        """What `encode` computes."""
        amax = scaling.amax_of(values) if layout.block_size is None else None
        for start, count, offset, size in zip(layout.starts, layout.counts, layout.offsets, layout.sizes, strict=True):
            if count == 0:
                continue
            scales, payload = layout.scale_count(count), layout.payload_bytes(count)
            block = layout.block_size or math.ceil(payload / scales)
            part = values[start : start + count].float()
            blocks = F.pad(part, (0, scales * block - part.numel())).view(scales, block)
            if amax is None:
                low, high = blocks.aminmax(dim=1)
                block_amax = torch.maximum(-low, high)
            else:
                block_amax = amax.expand(scales)
            scale, inverse_scale = scaling.scale_of(block_amax, dtype, power_of_two)
            bits = saturate(blocks * scale[:, None], dtype).view(torch.uint8)
            message[offset : offset + payload] = bits.view(-1)[:payload]
            message[offset + payload : offset + size] = inverse_scale.view(torch.uint8)

    @staticmethod
    def encode_parts(
        tensors: Sequence[torch.Tensor],
        message: torch.Tensor,
        layout: MessageLayout,
        dtype: torch.dtype,
        power_of_two: bool,
    ) -> None:
        """What `encode_parts` computes."""
        Reference.encode(side_by_side(tensors, len(layout.counts)), message, layout, dtype, power_of_two)

    @staticmethod
    def decode(message: torch.Tensor, values: torch.Tensor, layout: MessageLayout, dtype: torch.dtype) -> None:
        """What `decode` computes."""
        for start, count, offset in zip(layout.starts, layout.counts, layout.offsets, strict=True):
            part = values[start : start + count]
            part.copy_(_piece(message, offset, count, layout, dtype)[: part.numel()])

    @staticmethod
    def decode_sum(
        messages: torch.Tensor, values: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float
    ) -> None:
        """What `decode_sum` computes."""
        values.copy_(_sum(messages, layout, dtype, factor))

    @staticmethod
    def decode_sum_encode(
        messages: torch.Tensor,
        message: torch.Tensor,
        layout: MessageLayout,
        dtype: torch.dtype,
        power_of_two: bool,
        factor: float,
    ) -> None:
        """What `decode_sum_encode` computes for blocks."""
        one = MessageLayout(layout.counts[:1], layout.block_size)
        Reference.encode(_sum(messages, layout, dtype, factor), message, one, dtype, power_of_two)


def _piece(
    message: torch.Tensor, offset: int, count: int, layout: MessageLayout, dtype: torch.dtype, factor: float = 1.0
) -> torch.Tensor:
    """The values of one piece in FP32, times `factor`."""
    payload, size = layout.payload_bytes(count), layout.piece_bytes(count)
    bits = message[offset : offset + count].view(dtype).float() * factor
    inverse_scale = message[offset + payload : offset + size].view(torch.float32)
    return bits * inverse_scale.repeat_interleave(layout.block_size or count)[:count]


def _sum(messages: torch.Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float) -> torch.Tensor:
    count = layout.counts[0]
    total = torch.zeros(count, dtype=torch.float32, device=messages.device)
    for offset in layout.offsets:
        total += _piece(messages, offset, count, layout, dtype, factor)
    return total


@cache
def _implementation_on(device: torch.device) -> ModuleType | type[Reference]:
    if device.type == "cuda" and why_no_fp8(device) is None:
        from fp8booster.kernels import block_cast_triton  # Triton is needed only here

        return block_cast_triton
    return Reference


def _implementation(tensor: torch.Tensor) -> ModuleType | type[Reference]:
    return _implementation_on(tensor.device)

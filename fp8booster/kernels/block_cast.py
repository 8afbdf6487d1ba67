"""FP8 messages: values cast in blocks, with the inverse scales that undo the cast, as `message_layout` lays them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.cast import saturate
from fp8booster.kernels.message_layout import MessageLayout, side_by_side
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amax_of, scale_of


@operator(rounds_to_fp8=True)
def encode(
    values: Tensor | Sequence[Tensor],
    message: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> None:
    """Cast values to FP8 with real-time scales, into a message.

    Args:
        values: [N], contiguous, BF16, FP16 or FP32; N may be less than the layout's pieces hold. Or several tensors of
            one dtype: each is divided evenly among the pieces, which hold its parts side by side. Those whose parts are
            whole blocks are not copied for it.
        message: uint8 [layout.bytes], at a multiple of 16 bytes; all of it is written.
        layout: the pieces.
        dtype: the FP8 format.
        power_of_two: see `scales.scale_of`.

    A block with an infinity or a NaN arrives as NaN: its inverse scale is.
    """
    values = values if isinstance(values, Tensor) else side_by_side(values, layout.pieces)
    if layout.bytes == 0:
        return
    # one scale over all pieces: a rank that gets one of them multiplies by the scale of the whole tensor
    amax = amax_of(values) if layout.block_size is None else None
    count, scales, payload = layout.count, layout.scale_count, layout.payload_bytes
    block = layout.block_size or math.ceil(payload / scales)
    parts = F.pad(values.flatten().float(), (0, layout.pieces * count - values.numel())).view(layout.pieces, count)
    # scales in the padding are those of zeros: every byte of a message is defined
    blocks = F.pad(parts, (0, scales * block - count)).view(layout.pieces, scales, block)
    if amax is None:
        low, high = blocks.aminmax(dim=2)
        block_amax = torch.maximum(-low, high)
    else:
        block_amax = amax.expand(layout.pieces, scales)
    scale, inverse_scale = scale_of(block_amax, dtype, power_of_two)
    bits = saturate(blocks * scale.unsqueeze(2), dtype).view(torch.uint8)
    written = message.view(layout.pieces, layout.piece_bytes)
    written[:, :payload] = bits.view(layout.pieces, -1)[:, :payload]
    written[:, payload:] = inverse_scale.contiguous().view(torch.uint8)


@operator(rounds_to_fp8=True, writes=("values",))
def decode(message: Tensor, values: Tensor, layout: MessageLayout, dtype: torch.dtype) -> None:
    """Write the values of a message that `encode` made, each rounded once to the dtype of `values`.

    Args:
        message: uint8 [layout.bytes].
        values: [N], contiguous; N may be less than the layout's pieces hold.
        layout, dtype: as in `encode`.
    """
    if layout.bytes:
        values.copy_(_pieces(message, layout, dtype).view(-1)[: values.numel()])


@operator(rounds_to_fp8=True, writes=("values",))
def decode_sum(
    messages: Tensor, values: Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float = 1.0
) -> None:
    """Add the pieces of a message in FP32, first to last, each times `factor`.

    Args:
        messages: pieces of N values.
        values: [N], contiguous.
        layout, dtype: as in `encode`.
        factor: 1 for a sum, 1 / pieces for a mean. It multiplies the FP8 values, so that no sum of what has a finite
            mean overflows.
    """
    values.copy_(_sum(messages, layout, dtype, factor))


@operator(rounds_to_fp8=True)
def decode_sum_encode(
    messages: Tensor,
    message: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
    factor: float = 1.0,
) -> None:
    """Cast the sum of `decode_sum`, in FP32, again into a message of one piece.

    Args:
        messages, layout, dtype, factor: as in `decode_sum`.
        message: uint8 [one piece's bytes].
        power_of_two: see `scales.scale_of`.
    """
    encode.reference(_sum(messages, layout, dtype, factor), message, layout.piece, dtype, power_of_two)


def _pieces(message: Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Return the values of the pieces in FP32, times `factor`, [pieces, count]."""
    pieces, count = message.view(layout.pieces, layout.piece_bytes), layout.count
    # the factor before the scale, as in the kernel, whose order the bits follow
    bits = pieces[:, :count].contiguous().view(dtype).float() * factor
    inverse_scale = pieces[:, layout.payload_bytes :].contiguous().view(torch.float32)
    return bits * inverse_scale.repeat_interleave(layout.block_size or max(count, 1), 1)[:, :count]


def _sum(messages: Tensor, layout: MessageLayout, dtype: torch.dtype, factor: float) -> Tensor:
    # in FP32, first piece to last, on every rank: replicas get the same bits
    total = torch.zeros(layout.count, dtype=torch.float32, device=messages.device)
    for message in messages.view(layout.pieces, layout.piece_bytes):
        total += _pieces(message, layout.piece, dtype, factor)[0]
    return total

"""Weighted sums of rows that lie in a message, each a piece of it: decoded where they are added.

    y[t] = sum over j of weights[t, j] * row places[t, j] of the message

In backward the gradient of each row is encoded as it is made. Values are those of `block_cast` and `token_rows` one
behind the other, and no row is written in high precision between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels import block_cast, token_rows
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.operators import operator


@operator(rounds_to_fp8=True)
def sum_message(
    message: Tensor, places: Tensor, weights: Tensor, layout: MessageLayout, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Return the weighted sum of each token's rows.

    Args:
        message: uint8 [layout.bytes], of R rows, each a piece of H values.
        places: int64 [T, k], contiguous: the rows of each token.
        weights: [T, k], contiguous.
        layout: of the message, whose scales are of blocks.
        dtype: its FP8 format.
        out_dtype: of rows as they are decoded, and of sums.

    Returns:
        [T, H].
    """
    rows = message.new_empty(layout.pieces, layout.count, dtype=out_dtype)
    block_cast.decode(message, rows.view(-1), layout, dtype)
    return token_rows.sum_rows(rows, places, weights)


@operator(rounds_to_fp8=True)
def sum_message_backward(
    gradient: Tensor,
    message: Tensor,
    places: Tensor,
    weights: Tensor,
    layout: MessageLayout,
    dtype: torch.dtype,
    power_of_two: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the rows, as a message, and of the weights.

    Args:
        gradient: [T, H], contiguous: of the sums, whose dtype rows are decoded to.
        message, places, weights, layout, dtype: as in `sum_message`; every row is in `places`, once.
        power_of_two: as in `block_cast.encode`.

    Returns:
        (uint8 [layout.bytes]; [T, k] of the weights' dtype).
    """
    rows = gradient.new_empty(layout.pieces, layout.count)
    block_cast.decode(message, rows.view(-1), layout, dtype)
    drows, dweights = token_rows.sum_rows_backward(gradient, rows, places, weights)
    dmessage = torch.empty_like(message)
    block_cast.encode(drows.view(-1), dmessage, layout, dtype, power_of_two)
    return dmessage, dweights

"""Sums of rows that lie in a message, each a piece of it: decoded where they are added.

    y[t] = sum over j of row places[t, j] of the message             where it has so many

Values are those of `block_cast` and `token_rows` one behind the other, and no row is written in high precision between
them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels import block_cast, token_rows
from fp8booster.kernels.message_layout import MessageLayout
from fp8booster.kernels.operators import operator


@operator(rounds_to_fp8=True)
def sum_message(
    message: Tensor, places: Tensor, layout: MessageLayout, dtype: torch.dtype, out_dtype: torch.dtype
) -> Tensor:
    """Return the sum of each token's rows.

    Args:
        message: uint8 [layout.bytes], of R rows, each a piece of H values.
        places: int64 [T, k], contiguous: the rows of each token; R or more where there is none.
        layout: of the message, whose scales are of blocks.
        dtype: its FP8 format.
        out_dtype: of rows as they are decoded, and of sums.

    Returns:
        [T, H].
    """
    rows = message.new_empty(layout.pieces, layout.count, dtype=out_dtype)
    block_cast.decode(message, rows.view(-1), layout, dtype)
    return token_rows.sum_rows(rows, places)

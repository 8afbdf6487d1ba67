"""Lay tokens out for grouped products: sorted by expert, each expert's rows padded with zeros to a multiple of 16.

How many rows an expert gets is known on the device alone: the host, which would wait for the GPU, knows how many there
are at most.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.grouped_product import Groups
from fp8booster.nn.linear.functional import linear_map


class RowLayout(NamedTuple):
    """The rows of T tokens."""

    groups: Groups
    places: torch.Tensor
    """int64 [T], different from each other: the row of each token."""

    @classmethod
    def of(cls, counts: torch.Tensor, tokens: int) -> RowLayout:
        """Return the places of tokens that lie by sender, and of each sender by expert.

        Args:
            counts: int64 [senders, experts], tokens from each sender for each expert.
            tokens: their number, T.
        """
        # the sum of the weight gradient over no rows would be refused
        rows = (counts.sum(0) + (ALIGNMENT - 1)).div_(ALIGNMENT, rounding_mode="floor").clamp_(min=1).mul_(ALIGNMENT)
        ends = rows.cumsum(0)
        pieces = counts.flatten()
        # where a piece begins among the rows, less where it begins among the tokens
        shifts = (ends - rows + counts.cumsum(0) - counts).flatten() - (pieces.cumsum(0) - pieces)
        places = torch.arange(tokens, dtype=torch.int64, device=counts.device)
        places += shifts.repeat_interleave(pieces, output_size=tokens)
        # at most 16 rows more for each expert: those that are spare pad the last one's
        most = tokens // ALIGNMENT * ALIGNMENT + ALIGNMENT * counts.shape[1]
        ends = ends.to(torch.int32)  # as the product takes them
        ends[-1:].fill_(most)
        return cls(Groups(most, ends), places)


def permute(tokens: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Tokens [T, ...] in their rows, with zeros between them; differentiable."""
    return linear_map(tokens, partial(_into_rows, layout=layout), partial(_out_of_rows, layout=layout))


def unpermute(rows: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Return what lies in the tokens' rows, [T, ...]; differentiable."""
    return linear_map(rows, partial(_out_of_rows, layout=layout), partial(_into_rows, layout=layout))


def _into_rows(values: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    # zeros, not copies of some token: what an expert makes of a token that was not sent to it may overflow
    rows = values.new_zeros((layout.groups.rows, *values.shape[1:]))
    return rows.index_copy_(0, layout.places, values)


def _out_of_rows(rows: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    return rows.index_select(0, layout.places)

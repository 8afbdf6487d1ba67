"""Lay tokens out for grouped products: sorted by expert, each expert's rows padded with zeros to a multiple of 16."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from fp8booster.kernels.alignment import ALIGNMENT, aligned
from fp8booster.kernels.grouped_product import Groups
from fp8booster.nn.linear.functional import linear_map


class RowLayout(NamedTuple):
    """The rows of T tokens."""

    groups: Groups
    places: torch.Tensor
    """int64 [T], different from each other: the row of each token."""

    @classmethod
    def of(cls, counts: Sequence[Sequence[int]], device: torch.device) -> RowLayout:
        """The places of tokens that lie by sender, and of each sender by expert.

        Args:
            counts: tokens from each sender for each expert, [senders][experts].
            device: of the tokens.
        """
        totals = [sum(of_expert) for of_expert in zip(*counts, strict=True)]
        # the sum of the weight gradient over no rows would be refused
        rows = [max(ALIGNMENT, aligned(total)) for total in totals]
        ends = list(accumulate(rows))
        free = [end - each for end, each in zip(ends, rows, strict=True)]
        shifts, sizes, first = [], [], 0
        for sender in counts:
            for expert, count in enumerate(sender):
                shifts.append(free[expert] - first)
                sizes.append(count)
                free[expert] += count
                first += count
        # int32, as the product takes the ends; pinned, so that the host need not wait for the device
        numbers = torch.tensor(ends + shifts + sizes, dtype=torch.int32, pin_memory=device.type == "cuda")
        numbers = numbers.to(device, non_blocking=True)
        group_ends, of_pieces, counted = numbers.split([len(ends), len(shifts), len(sizes)])
        places = torch.arange(first, dtype=torch.int64, device=device)
        places += of_pieces.repeat_interleave(counted, output_size=first)
        return cls(Groups(tuple(rows), group_ends), places)


def permute(tokens: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Tokens [T, ...] in their rows, with zeros between them; differentiable."""
    return linear_map(tokens, partial(_into_rows, layout=layout), partial(_out_of_rows, layout=layout))


def unpermute(rows: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    """Return what lies in the tokens' rows, [T, ...]; differentiable."""
    return linear_map(rows, partial(_out_of_rows, layout=layout), partial(_into_rows, layout=layout))


def _into_rows(values: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    # zeros, not copies of some token: what an expert makes of a token that was not sent to it may overflow
    rows = values.new_zeros((sum(layout.groups.rows), *values.shape[1:]))
    return rows.index_copy_(0, layout.places, values)


def _out_of_rows(rows: torch.Tensor, layout: RowLayout) -> torch.Tensor:
    return rows.index_select(0, layout.places)

"""The rows that grouped products read for experts: where each choice of a token lies, and what each row holds.

    experts one after the other; of each its choices in order, then rows that pad, to a multiple of 16 and not of 0

How many choices an expert gets is known on the device alone. The host, which would wait for it, knows how many rows
there are at most: what is spare pads the last expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.operators import operator


class ExpertRows(NamedTuple):
    """M rows of N choices for G experts."""

    ends: Tensor
    """int32 [G]: the row behind each expert's last; that of the last expert is M."""

    places: Tensor
    """int64 [N]: the row of each choice."""

    choices: Tensor
    """int32 [M]: the choice that each row holds; -1 where it pads."""


def most_rows(choices: int, experts: int) -> int:
    """Return M: each expert has at most 16 rows more than choices, and 16 at least."""
    return choices // ALIGNMENT * ALIGNMENT + ALIGNMENT * experts


@operator()
def expert_rows(owners: Tensor, experts: int) -> ExpertRows:
    """Lay choices out as the rows of their experts.

    Args:
        owners: integers [N], contiguous: the expert of each choice, from 0 to G - 1, which is not examined.
        experts: their number, G.
    """
    device, most = owners.device, most_rows(len(owners), experts)
    by_expert, order = owners.sort(stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=owners.dtype, device=device))
    # the sum of the weight gradient over no rows would be refused
    sizes = (begins.diff() + (ALIGNMENT - 1)).div_(ALIGNMENT, rounding_mode="floor").clamp_(min=1).mul_(ALIGNMENT)
    ends = sizes.cumsum(0)
    by_rank = (
        torch.arange(len(owners), dtype=torch.int64, device=device) + (ends - sizes - begins[:-1])[by_expert.long()]
    )
    places = torch.empty_like(order).scatter_(0, order, by_rank)
    choices = torch.full((most,), -1, dtype=torch.int32, device=device)
    choices.scatter_(0, places, torch.arange(len(owners), dtype=torch.int32, device=device))
    taken = ends.to(torch.int32)
    taken[-1:].fill_(most)
    return ExpertRows(taken, places, choices)

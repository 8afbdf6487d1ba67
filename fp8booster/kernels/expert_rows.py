"""The rows of experts: where each choice of a token lies, and what each row holds.

    experts one after the other; of each its choices in order, then rows that pad, to a multiple of 16 and not of 0

Grouped products read rows that are padded so; rows that are sent to other ranks are not. The number of an expert's
choices is known on the device alone. The host, which would wait for it, knows how many rows there are at most: what is
spare pads the last expert.
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


SENT_ROWS = 256
"""M of choices that other ranks send is a multiple of this, for their number is another at each call: so sizes repeat,
and with them launches."""


def most_sent_rows(choices: int, experts: int) -> int:
    """Return M where choices are sent."""
    return -(-most_rows(choices, experts) // SENT_ROWS) * SENT_ROWS


@operator()
def expert_rows(owners: Tensor, experts: int, padded: bool = True) -> ExpertRows:
    """Lay choices out as the rows of their experts.

    Args:
        owners: integers [N], contiguous: the expert of each choice, from 0 to G - 1, which is not examined.
        experts: their number, G.
        padded: False: as many rows as choices.
    """
    return _laid_out(owners, experts, most_rows(len(owners), experts) if padded else len(owners), padded)


def _laid_out(owners: Tensor, experts: int, most: int, padded: bool) -> ExpertRows:
    device = owners.device
    by_expert, order = owners.sort(stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=owners.dtype, device=device))
    sizes = begins.diff()
    if padded:
        # the sum of the weight gradient over no rows would be refused
        sizes = (sizes + (ALIGNMENT - 1)).div_(ALIGNMENT, rounding_mode="floor").clamp_(min=1).mul_(ALIGNMENT)
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


@operator(writes=("numbers",))
def count_choices(owners: Tensor, numbers: Tensor, held: int, amaxes: Tensor | None = None) -> None:
    """Write down how many choices each expert has, as ranks tell each other.

    Args:
        owners: integers [N], contiguous: the expert of each choice.
        numbers: int64 [ranks, columns], contiguous; the first columns are written, with the choices of each rank's
            experts, in their order.
        held: experts of each rank.
        amaxes: float32 [P], contiguous, the bits of the largest magnitude of which are written to the column behind;
            None: nothing is.
    """
    experts = torch.arange(len(numbers) * held, dtype=owners.dtype, device=owners.device)
    numbers[:, :held] = (owners.unsqueeze(1) == experts).sum(0).view(-1, held)
    if amaxes is not None:
        numbers[:, held] = amaxes.max().abs().view(torch.int32)  # of zero and NaN too without a sign


def owners_of(counts: Tensor, choices: int) -> Tensor:
    """Return the expert of each choice, int64 [N], of choices that lie by sender, and of each sender by expert.

    Args:
        counts: int64 [senders, G], choices from each sender for each expert.
        choices: their number, N.
    """
    # the numbers of the counts, of which every sender has one for each expert; with their sum, so that nobody waits
    return torch.repeat_interleave(counts.flatten(), output_size=choices).remainder_(counts.shape[1])


@operator()
def sent_rows(counts: Tensor, choices: int) -> ExpertRows:
    """Lay out choices that lie by sender, and of each sender by expert, as `expert_rows` does, in `most_sent_rows`.

    Args:
        counts: int64 [senders, G], each row contiguous: choices from each sender for each expert; they add up to N.
        choices: their number, N.
    """
    experts = counts.shape[1]
    return _laid_out(owners_of(counts, choices), experts, most_sent_rows(choices, experts), padded=True)

"""The rows of experts: where each choice of a token lies, and what each row holds.

    experts one after the other; of each its choices in order, then rows that pad, to a multiple of 16 and not of 0

Grouped products read rows that are padded so; rows that are sent to other ranks are not. A choice may have no row, as
where its expert is on another rank.

The number of an expert's choices is known on the device alone. The host, which would wait for it, knows how many rows
there are at most: what is spare pads the last expert.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.operators import operator


class ExpertRows(NamedTuple):
    """M rows of N choices for G experts."""

    ends: Tensor
    """int32 [G]: the row behind each expert's last; of padded rows that of the last expert is M."""

    places: Tensor
    """int64 [N]: the row of each choice; M where it has none."""

    choices: Tensor
    """int32 [M]: the choice that each row holds; -1 where it pads, and 0 behind rows that are not padded."""


def most_rows(choices: int, experts: int) -> int:
    """Return M: each expert has at most 16 rows more than choices, and 16 at least."""
    return choices // ALIGNMENT * ALIGNMENT + ALIGNMENT * experts


REPEATED_ROWS = 256
"""M of choices that the host has counted is a multiple of this, for their number is another at each call: so sizes
repeat, and with them launches."""


def most_counted_rows(choices: int, experts: int) -> int:
    """Return M where the host knows how many choices have rows."""
    return -(-most_rows(choices, experts) // REPEATED_ROWS) * REPEATED_ROWS


@operator()
def expert_rows(owners: Tensor, experts: int, rows: int | None = None) -> ExpertRows:
    """Lay choices out as the rows of their experts.

    Args:
        owners: integers [N], contiguous: the expert of each choice. One that is not from 0 to G - 1 has no row.
        experts: their number, G.
        rows: M of rows that are not padded, as many at least as choices have one; None: they are padded.
    """
    device, choices, padded = owners.device, len(owners), rows is None
    most = most_rows(choices, experts) if rows is None else rows
    owners = owners.masked_fill((owners < 0) | (owners >= experts), experts)
    by_expert, order = owners.sort(stable=True)
    begins = torch.searchsorted(by_expert, torch.arange(experts + 1, dtype=owners.dtype, device=device))
    sizes = _padded(begins.diff()) if padded else begins.diff()
    ends = sizes.cumsum(0)
    shifts = F.pad(ends - sizes - begins[:-1], (0, 1))[by_expert.long()]
    by_rank = (torch.arange(choices, dtype=torch.int64, device=device) + shifts).masked_fill_(
        by_expert == experts, most
    )
    places = torch.empty_like(order).scatter_(0, order, by_rank)
    ends = ends.to(torch.int32)
    if padded:
        ends[-1:].fill_(most)
    return ExpertRows(ends, places, _held(places, most, -1 if padded else 0))


@operator()
def first_on_ranks(chosen: Tensor, held: int, ranks: int) -> Tensor:
    """Return the rank of each choice's expert, and `ranks` where a choice of the token before it is on the same one.

    Args:
        chosen: integers [T, k], contiguous: the experts of each token.
        held: experts of each rank.
        ranks: how many.

    Returns:
        int32 [T k].
    """
    owners = chosen.div(held, rounding_mode="floor").to(torch.int32)
    again = (owners.unsqueeze(2) == owners.unsqueeze(1)).tril_(-1).any(2)
    return owners.masked_fill_(again, ranks).view(-1)


WORD = 4
"""Bytes of a word."""


def words_of(of_token: int) -> int:
    """Return how many words `pack_choices` writes for a row: a multiple of 16 bytes.

    So rows of FP8 values without scales of their own, behind which they go, begin where a GPU reads 16 bytes at once.
    """
    return -(-3 * of_token // 4) * 4


@operator(writes=("words",))
def pack_choices(
    chosen: Tensor, weights: Tensor, choices: Tensor, places: Tensor, ends: Tensor, held: int, words: Tensor
) -> None:
    """Write what goes with each row of a token to the rank of its experts.

    Args:
        chosen: integers [T, k], contiguous: the experts of each token.
        weights: [T, k], contiguous, BF16, FP16 or FP32.
        choices: int32 [R], contiguous: a choice of each row's token, whose rank gets the row.
        places, ends: of all choices as rows of all experts, not padded (`ExpertRows`).
        held: experts of each rank.
        words: int32 [R, `words_of` k], each row contiguous: of the token of each row the experts, counted from the
            first of the rank that gets the row, and `held` in the place of those that are elsewhere; how many choices
            of this rank's tokens of the same expert come before; the bits of the weights in FP32; zeros.
    """
    of_token = chosen.shape[1]
    tokens = choices.div(of_token, rounding_mode="floor")
    first = chosen.view(-1).index_select(0, choices).div(held, rounding_mode="floor").mul_(held)
    all_of = chosen.index_select(0, tokens)
    own = all_of - first.unsqueeze(1)
    own.masked_fill_((own < 0) | (own >= held), held)
    before = places.view(chosen.shape).index_select(0, tokens) - F.pad(ends, (1, 0))[all_of.long()]
    bits = weights.index_select(0, tokens).float().view(torch.int32)
    found = torch.cat([own.to(torch.int32), before.to(torch.int32), bits], 1)
    words.copy_(F.pad(found, (0, words.shape[1] - found.shape[1])))


@operator()
def sender_begins(told: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return where the rows begin of choices that come from several ranks: by expert, and of each by sender.

    Args:
        told: as `place_sent` takes it.
        experts: here, G.

    Returns:
        int32 [G], the row behind the last one of each expert, padded; int32 [senders + 1, G], the first row of each
        sender, and of those that pad.
    """
    counts = told[:, :experts]
    sizes = _padded(counts.sum(0))
    ends = sizes.cumsum(0)
    before = F.pad(counts.cumsum(0), (0, 0, 1, 0))
    return ends.to(torch.int32), (ends - sizes + before).to(torch.int32)


@operator()
def place_sent(words: Tensor, told: Tensor, ends: Tensor, begins: Tensor, of_token: int, counted: int) -> ExpertRows:
    """Lay choices that came from several ranks out as the rows of their experts, as `expert_rows` does.

    Each row follows from what was sent alone, without counting.

    Args:
        words: int32 [T, words], each row contiguous: as `pack_choices` wrote them, by sender.
        told: int64 [senders, columns], each row contiguous: what each sender wrote by `count_choices`, for the experts
            here.
        ends, begins: as `sender_begins` gives them.
        of_token: the choices of a token, k.
        counted: how many of them have rows.
    """
    experts, most = len(ends), most_counted_rows(counted, len(ends))
    own, before = (each.long() for each in words[:, : 2 * of_token].tensor_split(2, 1))
    tokens = torch.arange(len(words), dtype=torch.int64, device=words.device)
    sender = torch.searchsorted(told[:, experts + 1].cumsum(0), tokens, right=True)
    rows = begins.long()[sender.unsqueeze(1), own.clamp(max=experts - 1)] + before
    places = rows.masked_fill_(own >= experts, most).view(-1)
    ends = ends.clone()
    ends[-1:].fill_(most)
    return ExpertRows(ends, places, _held(places, most, -1))


def _held(places: Tensor, most: int, unused: int) -> Tensor:
    """Return the choice that each row holds."""
    held = torch.full((most + 1,), unused, dtype=torch.int32, device=places.device)
    held.scatter_(0, places, torch.arange(len(places), dtype=torch.int32, device=places.device))
    return held[:most].clone()


def _padded(sizes: Tensor) -> Tensor:
    # the sum of the weight gradient over no rows would be refused
    return (sizes + (ALIGNMENT - 1)).div_(ALIGNMENT, rounding_mode="floor").clamp_(min=1).mul_(ALIGNMENT)


@operator(writes=("numbers",))
def count_choices(
    owners: Tensor, numbers: Tensor, held: int, amaxes: Tensor | None = None, ends: Tensor | None = None
) -> None:
    """Write down how many choices each expert has, as ranks tell each other.

    Args:
        owners: integers [N], contiguous: the expert of each choice.
        numbers: int64 [ranks, columns], contiguous; the first columns are written, with the choices of each rank's
            experts, in their order.
        held: experts of each rank.
        amaxes: float32 [P], contiguous, the bits of the largest magnitude of which are written to the column behind;
            None: nothing is.
        ends: int32 [ranks], contiguous: where the rows for each rank end, whose number is written to the column behind
            that; None: nothing is.
    """
    experts = torch.arange(len(numbers) * held, dtype=owners.dtype, device=owners.device)
    numbers[:, :held] = (owners.unsqueeze(1) == experts).sum(0).view(-1, held)
    if amaxes is not None:
        numbers[:, held] = amaxes.max().abs().view(torch.int32)  # of zero and NaN too without a sign
    if ends is not None:
        numbers[:, held + 1] = ends.diff(prepend=ends.new_zeros(1))

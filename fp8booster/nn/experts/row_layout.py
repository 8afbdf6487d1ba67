"""Where tokens lie in grouped products: sorted by expert, each expert's rows padded with zeros to a multiple of 16.

    choice t k + j: the j-th expert of token t, of T tokens with k experts each
    row r holds choice choices[r]; token t's rows are places[t]

How many rows an expert gets is known on the device alone: the host, which would wait for the GPU, knows how many there
are at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.grouped_product import Groups


class RowLayout(NamedTuple):
    """The rows of T tokens with k choices each."""

    groups: Groups
    places: torch.Tensor
    """int64 [T, k], different from each other: the rows of each token."""
    choices: torch.Tensor
    """int32 [M]: the choice that each row holds; -1 where it pads."""

    @classmethod
    def of_choices(cls, chosen: torch.Tensor, experts: int) -> RowLayout:
        """Return the layout of tokens whose choices lie as routers give them.

        Args:
            chosen: integers [T, k]: the experts of each token.
            experts: their number, G.
        """
        keys = chosen.reshape(-1)
        if experts <= torch.iinfo(torch.int16).max:
            keys = keys.to(torch.int16)  # a GPU sorts them in two passes, not in eight
        owners, choices = keys.sort(stable=True)
        # in a sorted list each expert's begin is found by halves: no comparison of each choice with each expert
        begins = torch.searchsorted(owners, torch.arange(experts + 1, dtype=keys.dtype, device=keys.device))
        groups, starts = _groups(begins.diff(), len(keys))
        by_rank = torch.arange(len(keys), device=keys.device) + (starts - begins[:-1])[owners.long()]
        places = torch.empty_like(choices).scatter_(0, choices, by_rank)
        return cls._of_places(groups, places.view(chosen.shape))

    @classmethod
    def of_senders(cls, counts: torch.Tensor, tokens: int) -> RowLayout:
        """Return the layout of tokens with one choice each that lie by sender, and of each sender by expert.

        Args:
            counts: int64 [senders, experts], tokens from each sender for each expert.
            tokens: their number, T.
        """
        groups, starts = _groups(counts.sum(0), tokens)
        pieces = counts.flatten()
        # where a piece begins among the rows, less where it begins among the tokens
        shifts = (starts + counts.cumsum(0) - counts).flatten() - (pieces.cumsum(0) - pieces)
        places = torch.arange(tokens, dtype=torch.int64, device=counts.device)
        places += shifts.repeat_interleave(pieces, output_size=tokens)
        return cls._of_places(groups, places.view(-1, 1))

    @classmethod
    def _of_places(cls, groups: Groups, places: torch.Tensor) -> RowLayout:
        numbers = torch.arange(places.numel(), dtype=torch.int32, device=places.device)
        choices = torch.full((groups.rows,), -1, dtype=torch.int32, device=places.device)
        return cls(groups, places, choices.scatter_(0, places.view(-1), numbers))

    @property
    def of_token(self) -> int:
        """The choices of a token, k."""
        return self.places.shape[1]

    def by_choice(self) -> RowLayout:
        """Return the same rows as those of T k tokens with one choice each."""
        return self._replace(places=self.places.view(-1, 1))


def _groups(counts: torch.Tensor, rows: int) -> tuple[Groups, torch.Tensor]:
    """Return the groups of experts that get so many rows each, int64 [G], and where they start, int64 [G]."""
    # the sum of the weight gradient over no rows would be refused
    sizes = (counts + (ALIGNMENT - 1)).div_(ALIGNMENT, rounding_mode="floor").clamp_(min=1).mul_(ALIGNMENT)
    ends = sizes.cumsum(0)
    # at most 16 rows more for each expert: those that are spare pad the last one's
    most = rows // ALIGNMENT * ALIGNMENT + ALIGNMENT * len(counts)
    as_taken = ends.to(torch.int32)  # by the product
    as_taken[-1:].fill_(most)
    return Groups(most, as_taken), ends - sizes


def owners_of(counts: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the expert of each token, int64 [T], of tokens that lie by sender, and of each sender by expert.

    Args:
        counts: int64 [senders, experts], tokens from each sender for each expert.
        tokens: their number, T.
    """
    senders, experts = counts.shape
    numbers = torch.arange(experts, dtype=torch.int64, device=counts.device).repeat(senders)
    return numbers.repeat_interleave(counts.flatten(), output_size=tokens)

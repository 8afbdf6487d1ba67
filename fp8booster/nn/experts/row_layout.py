"""Where tokens lie in grouped products: sorted by expert, each expert's rows padded with zeros to a multiple of 16.

    choice t k + j: the j-th expert of token t, of T tokens with k experts each
    row r holds choice choices[r]; token t's rows are places[t]

A row's place follows from the choices alone (`kernels.expert_rows`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.expert_rows import expert_rows
from fp8booster.kernels.grouped_product import Groups


class RowLayout(NamedTuple):
    """The rows of T tokens with k choices each."""

    groups: Groups
    places: torch.Tensor
    """int64 [T, k]: the rows of each token; M where a choice has none."""
    choices: torch.Tensor
    """int32 [M]: the choice that each row holds; -1 where it pads."""

    @classmethod
    def of_choices(cls, chosen: torch.Tensor, experts: int, counted: int | None = None) -> RowLayout:
        """Return the layout of tokens whose choices lie as routers give them.

        Args:
            chosen: integers [T, k]: the experts of each token. One that is not from 0 to G - 1 has no row.
            experts: their number, G.
            counted: so many choices have rows, as the host knows; None: it knows their number alone.
        """
        ends, places, choices = expert_rows(chosen.reshape(-1).contiguous(), experts, counted=counted)
        return cls(Groups(len(choices), ends), places.view(chosen.shape), choices)

    @property
    def of_token(self) -> int:
        """The choices of a token, k."""
        return self.places.shape[1]

    def by_choice(self) -> RowLayout:
        """Return the same rows as those of T k tokens with one choice each."""
        return self._replace(places=self.places.view(-1, 1))

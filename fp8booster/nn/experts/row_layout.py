"""Where tokens lie in grouped products: sorted by expert, each expert's rows padded with zeros to a multiple of 16.

    choice t k + j: the j-th expert of token t, of T tokens with k experts each
    row r holds choice choices[r]; token t's rows are places[t]

A row's place follows from the choices alone (`kernels.expert_rows`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8booster.kernels.expert_rows import ExpertRows, expert_rows, place_sent
from fp8booster.kernels.grouped_product import Groups


class RowLayout(NamedTuple):
    """The rows of T tokens with k choices each."""

    groups: Groups
    places: torch.Tensor
    """int64 [T, k]: the rows of each token; M where a choice has none."""
    choices: torch.Tensor
    """int32 [M]: the choice that each row holds; -1 where it pads."""

    @classmethod
    def of_choices(cls, chosen: torch.Tensor, experts: int) -> RowLayout:
        """Return the layout of tokens whose choices lie as routers give them.

        Args:
            chosen: integers [T, k]: the experts of each token. One that is not from 0 to G - 1 has no row.
            experts: their number, G.
        """
        return cls._of(expert_rows(chosen.reshape(-1).contiguous(), experts), chosen.shape[1])

    @classmethod
    def of_sent(
        cls,
        words: torch.Tensor,
        told: torch.Tensor,
        ends: torch.Tensor,
        begins: torch.Tensor,
        of_token: int,
        counted: int,
    ) -> RowLayout:
        """Return the layout of tokens that came from several ranks; the arguments are those of `place_sent`."""
        return cls._of(place_sent(words, told, ends, begins, of_token, counted), of_token)

    @classmethod
    def _of(cls, rows: ExpertRows, of_token: int) -> RowLayout:
        return cls(Groups(len(rows.choices), rows.ends), rows.places.view(-1, of_token), rows.choices)

    @property
    def of_token(self) -> int:
        """The choices of a token, k."""
        return self.places.shape[1]

    def by_choice(self) -> RowLayout:
        """Return the same rows as those of T k tokens with one choice each."""
        return self._replace(places=self.places.view(-1, 1))

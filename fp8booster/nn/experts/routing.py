"""The rows that tokens become on their way to experts, and what is made of them.

    tokens [T, H] -- copied --> rows [R, H], sorted by expert -- experts --> rows -- weighted sum --> [T, H]

A token has a row for each of its experts, or one for each rank that holds some of them. A gradient goes the same ways
back: a token's rows are added up where they lie, not row by row at the token's index, for which a GPU would sort them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fp8booster.kernels.expert_rows import WORD, count_choices, expert_rows, first_on_ranks, pack_choices, words_of
from fp8booster.kernels.token_rows import gather_rows, sum_rows, sum_rows_backward
from fp8booster.nn.experts.fp8_rows import Rows
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.linear.functional import linear_map, once_differentiable


class Routed:
    """T tokens and those experts of this rank to which each goes.

    Args:
        tokens: [T, H].
        chosen: integers [T, k]: the experts of each token, counted from the first one here.
        weights: [T, k], of the results.
    """

    def __init__(self, tokens: Rows, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        self.tokens, self._chosen, self._weights = tokens, chosen, weights

    @property
    def chosen(self) -> torch.Tensor:
        """Return the experts of each token, integers [T, k]; one elsewhere has the number of the experts here."""
        return self._chosen

    @property
    def weights(self) -> torch.Tensor:
        """Return those of the results, [T, k]."""
        return self._weights

    @property
    def rows(self) -> int:
        """Return the number of choices of experts here."""
        return self.chosen.numel()

    def counts(self, experts: int) -> HostCopy:
        """Return how many choices each of so many experts has, int64 [1, experts]."""
        return HostCopy(count_rows(self.chosen, experts).view(1, -1))

    def layout(self, experts: int) -> RowLayout:
        """Return where grouped products of so many experts have the tokens."""
        return RowLayout.of_choices(self.chosen, experts)


class Sent(Routed):
    """Tokens that came from several ranks.

    Args:
        tokens: as of `Routed`.
        of_token: the choices of a token, k.
        weights: gives their weights, [T, k], where they are read: an experts' product is queued before.
        words: int32 [T, words], each row contiguous: their choices, as `pack_choices` wrote them.
        told: as `place_sent` takes it.
        begins: as `sender_begins` gives them.
        counts: int64 [1, experts], choices of each, which the host knows.
    """

    def __init__(
        self,
        tokens: Rows,
        of_token: int,
        weights: Callable[[], torch.Tensor],
        words: torch.Tensor,
        told: torch.Tensor,
        begins: tuple[torch.Tensor, torch.Tensor],
        counts: HostCopy,
    ) -> None:
        self.tokens, self._of_token, self._give_weights = tokens, of_token, weights
        self._words, self._told, self._begins, self._counts = words, told, begins, counts

    @cached_property
    def chosen(self) -> torch.Tensor:
        """Return what `Routed` does, int64, which few ask for."""
        return self._words[:, : self._of_token].to(torch.int64)

    @cached_property
    def weights(self) -> torch.Tensor:
        """Return what `Routed` does."""
        return self._give_weights()

    @property
    def rows(self) -> int:
        """Return what `Routed` does."""
        return sum(self._counts.tolist()[0])

    def counts(self, experts: int) -> HostCopy:
        """Return what `Routed` does, which the host knows."""
        return self._counts

    def layout(self, experts: int) -> RowLayout:
        """Return what `Routed` does."""
        return RowLayout.of_sent(self._words, self._told, *self._begins, self._of_token, self.rows)


class Routes(NamedTuple):
    """The rows of T tokens with k choices each, sorted by what was chosen and among equals by token."""

    choices: torch.Tensor
    """int32 [R]: the choice of each row; choice t k + j is the j-th of token t."""

    places: torch.Tensor
    """int64 [T, k]: the rows of each token; R where a choice has none."""

    ends: torch.Tensor
    """int32 [G]: the row behind the last of each of the G that were chosen. What lies behind all has no meaning."""

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, rows: int | None = None) -> Routes:
        """Return the rows of the experts of each token, integers [T, k]; a choice of none of so many has no row.

        R is the number of choices that have one, as the host knows; None: all have.
        """
        rows = chosen.numel() if rows is None else rows
        return cls._of(chosen.reshape(-1).contiguous(), chosen.shape, experts, rows)

    @classmethod
    def to_ranks(cls, chosen: torch.Tensor, held: int, ranks: int) -> Routes:
        """Return a row of each token for each rank that holds experts of it.

        Args:
            chosen: integers [T, k], contiguous: the experts of each token.
            held: experts of each rank.
            ranks: how many.
        """
        tokens, of_token = chosen.shape
        # of several choices on one rank the first has the row
        owners = first_on_ranks(chosen, held, ranks)
        return cls._of(owners, chosen.shape, ranks, tokens * min(ranks, of_token))

    @classmethod
    def _of(cls, owners: torch.Tensor, shape: torch.Size, experts: int, rows: int) -> Routes:
        ends, places, choices = expert_rows(owners, experts, rows)
        return cls(choices, places.view(shape), ends)

    @property
    def tokens(self) -> torch.Tensor:
        """Return the token of each row, int32 [R]."""
        return self.choices.div(self.places.shape[1], rounding_mode="floor")


def count_rows(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """Return how many rows each expert gets, int64; unlike `torch.bincount`, without making the host wait for a GPU.

    Args:
        chosen: integers [T, k].
        experts: of all ranks.
    """
    counts = chosen.new_empty(1, experts, dtype=torch.int64)
    count_choices(chosen.reshape(-1).contiguous(), counts, experts)
    return counts[0]


def rows_of(tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return tokens [T, H] as rows [R, H]; differentiable."""
    return linear_map(
        tokens, lambda tokens: tokens.index_select(0, routes.tokens), lambda gradient: sum_of_rows(gradient, routes)
    )


def sum_of_rows(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Add rows [R, H] up by token, [T, H]; not differentiable."""
    return sum_rows(rows.contiguous(), routes.places)


class Choices(NamedTuple):
    """The choices of this rank's tokens, as they go to other ranks."""

    chosen: torch.Tensor
    """Integers [T, k], contiguous: the experts of each token."""

    to_ranks: Routes
    to_experts: Routes
    """The rows of tokens for ranks, and for experts, of all ranks."""

    held: int
    """Experts of each rank."""

    @classmethod
    def of(cls, chosen: torch.Tensor, held: int, ranks: int) -> Choices:
        """Return those of the experts of each token, contiguous."""
        return cls(chosen, Routes.to_ranks(chosen, held, ranks), Routes.of(chosen, held * ranks), held)

    @property
    def words(self) -> int:
        """Return how many words go with a row."""
        return words_of(self.chosen.shape[1])

    def with_rows(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the row of each token for each rank, and words of choices behind it; not differentiable.

        Args:
            tokens: [T, C] FP8, contiguous, of one row at least; C is a multiple of 4.
            weights: [T, k].

        Returns:
            uint8 [R, C + 4 `words`].
        """
        choices, columns = self.to_ranks.choices, tokens.shape[1]
        rows = tokens.new_empty(len(choices), columns + WORD * self.words, dtype=torch.uint8)
        if len(rows):  # kernels are not launched over nothing
            gather_rows(tokens, choices, self.chosen.shape[1], out=rows[:, :columns].view(tokens.dtype))
        self._write(weights.detach(), rows[:, columns:].view(torch.int32))
        return rows

    def apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `with_rows` joined, of some rows: uint8 [R, C], and float32 [R, `words`]."""
        columns = rows.shape[1] - WORD * self.words
        return rows[:, :columns], rows[:, columns:].view(torch.float32)

    def _write(self, weights: torch.Tensor, words: torch.Tensor) -> None:
        (choices, _, _), (_, places, ends) = self.to_ranks, self.to_experts
        pack_choices(self.chosen, weights.contiguous(), choices, places.view(-1), ends, self.held, words)

    def packed(self, weights: torch.Tensor) -> torch.Tensor:
        """Return what goes with each row, float32 [R, `words`]; differentiable by the weights, [T, k]."""
        rows, of_token, routes = len(self.to_ranks.choices), self.chosen.shape[1], self.to_ranks

        def forward(weights: torch.Tensor) -> torch.Tensor:
            words = weights.new_empty(rows, self.words, dtype=torch.float32)
            self._write(weights, words.view(torch.int32))
            return words

        dtype = weights.dtype  # backward keeps no more than it reads
        return linear_map(
            weights, forward, lambda gradient: sum_of_rows(sent_weights(gradient, of_token), routes).to(dtype)
        )


def sent_weights(words: torch.Tensor, of_token: int) -> torch.Tensor:
    """Return the weights among words of choices, float32 [R, words]; differentiable."""
    return words[:, 2 * of_token : 3 * of_token]


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return the sum over a token's rows times their weights; differentiable.

    Args:
        rows: [R, H].
        weights: [T, k]; the sum is of the dtype that a product of both has.
        routes: of the rows.

    Returns:
        [T, H] of the rows' dtype.
    """
    return _WeightedSum.apply(rows, weights, routes)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, routes: Routes) -> torch.Tensor:
        rows, weights = rows.contiguous(), weights.contiguous()
        ctx.save_for_backward(rows, weights)
        ctx.routes = routes
        return sum_rows(rows, routes.places, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        rows, weights = ctx.saved_tensors
        return *sum_rows_backward(gradient.contiguous(), rows, ctx.routes.places, weights), None

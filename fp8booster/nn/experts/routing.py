"""The rows that tokens become on their way to experts, and what is made of them.

    tokens [T, H] -- spread --> rows [R, H], sorted by expert -- experts --> rows -- weighted sum --> [T, H]

A token has a row for each of its experts, or one for each rank that holds some of them. A gradient goes the same ways
back: a token's rows are added up where they lie, not row by row at the token's index, for which a GPU would sort them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8booster.kernels.expert_rows import count_choices, expert_rows, first_on_ranks, pack_choices
from fp8booster.kernels.token_rows import gather_rows, sum_rows, sum_rows_backward
from fp8booster.nn.experts.fp8_rows import Rows
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.linear.functional import linear_map, once_differentiable


class Routed(NamedTuple):
    """T tokens and those experts of this rank to which each goes."""

    tokens: Rows
    """[T, H]"""

    chosen: torch.Tensor
    """int64 [T, k]: the experts of each token, counted from the first one here. One that is on another rank has the
    number of the experts here."""

    weights: torch.Tensor
    """[T, k], of the results."""

    counts: HostCopy | None = None
    """int64 [1, experts], choices of each; None: all choices are of experts here, and the host does not wait."""

    @property
    def rows(self) -> int:
        """The number of choices of experts here."""
        return self.chosen.numel() if self.counts is None else sum(self.counts.tolist()[0])

    def layout(self, experts: int) -> RowLayout:
        """Return where grouped products of so many experts have the tokens."""
        return RowLayout.of_choices(self.chosen, experts, None if self.counts is None else self.rows)


class Routes(NamedTuple):
    """The rows of T tokens with k choices each, sorted by what was chosen and among equals by token."""

    choices: torch.Tensor
    """int32 [R]: the choice of each row; choice t k + j is the j-th of token t."""

    places: torch.Tensor
    """int64 [T, k]: the rows of each token; R where a choice has none."""

    ends: torch.Tensor
    """int32 [G]: the row behind the last of each of the G that were chosen. What lies behind all has no meaning."""

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, counted: int | None = None) -> Routes:
        """From the experts of each token, integers [T, k]; arguments are as in `expert_rows`."""
        return cls._of(chosen.reshape(-1).contiguous(), chosen.shape, experts, counted)

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
    def _of(cls, owners: torch.Tensor, shape: torch.Size, experts: int, counted: int | None) -> Routes:
        ends, places, choices = expert_rows(owners, experts, padded=False, counted=counted)
        return cls(choices, places.view(shape), ends)

    @property
    def tokens(self) -> torch.Tensor:
        """The token of each row, int32 [R]."""
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


def spread(tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Tokens [T, H] as rows [R, H]; differentiable."""
    return linear_map(
        tokens, lambda tokens: tokens.index_select(0, routes.tokens), lambda gradient: sum_of_rows(gradient, routes)
    )


def sum_of_rows(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Rows [R, H] added up by token, [T, H]; not differentiable."""
    return sum_rows(rows.contiguous(), routes.places)


def spread_bytes(matrix: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Tokens in FP8, a matrix of T rows or more, as rows [R, C]; not differentiable."""
    if not len(routes.choices):  # kernels are not launched over nothing
        return matrix[:0]
    return gather_rows(matrix, routes.choices, routes.places.shape[1])[0]


def packed_choices(chosen: torch.Tensor, weights: torch.Tensor, routes: Routes, held: int) -> torch.Tensor:
    """Return the choices that go with each row to other ranks, float32 [R, 2 k]; differentiable by the weights.

    Args:
        chosen: integers [T, k], contiguous.
        weights: [T, k].
        routes: to ranks.
        held: experts of each rank.
    """

    def of_weights(gradient: torch.Tensor) -> torch.Tensor:
        return sum_of_rows(gradient[:, chosen.shape[1] :], routes).to(weights.dtype)

    return linear_map(
        weights, lambda weights: pack_choices(chosen, weights.contiguous(), routes.choices, held), of_weights
    )


def unpacked_choices(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the choices of tokens that came: the experts here, int64 [U, k], and their weights, float32 [U, k]."""
    own, weights = packed.tensor_split(2, 1)
    return own.detach().view(torch.int32).to(torch.int64), weights


def weighted_sum(rows: torch.Tensor, weights: torch.Tensor, routes: Routes) -> torch.Tensor:
    """The sum over a token's rows times their weights; differentiable.

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

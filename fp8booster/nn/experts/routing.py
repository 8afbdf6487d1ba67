"""The rows that tokens become on their way to experts, and what is made of them.

    tokens [T, H] -- spread --> rows [R, H], sorted by expert -- experts --> rows -- weighted sum --> [T, H]

A token has a row for each of its experts, or one for each rank that holds some of them. A gradient goes the same ways
back: a token's rows are added up where they lie, not row by row at the token's index, for which a GPU would sort them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from fp8booster.kernels.expert_rows import count_choices, expert_rows
from fp8booster.kernels.token_rows import gather_rows, sum_rows, sum_rows_backward
from fp8booster.nn.linear.functional import linear_map, once_differentiable


class Routes(NamedTuple):
    """The rows of T tokens with k choices each, sorted by what was chosen and among equals by token."""

    choices: torch.Tensor
    """int32 [R]: the choice of each row; choice t k + j is the j-th of token t."""

    places: torch.Tensor
    """int64 [T, k]: the rows of each token; R or more where a choice has none."""

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int) -> Routes:
        """From the experts of each token, int64 [T, k], which are fewer than `experts`."""
        _, places, choices = expert_rows(chosen.reshape(-1).contiguous(), experts, padded=False)
        return cls(choices, places.view(chosen.shape))

    @classmethod
    def of_some(cls, chosen: torch.Tensor, experts: int, rows: int) -> Routes:
        """Return `rows` rows of choices, integers [T, k], of which those of the number `experts` have none."""
        choices, places = cls.of(chosen, experts + 1)  # sorted behind all others, they lie behind the rows
        return cls(choices[:rows], places)

    @classmethod
    def to_ranks(cls, chosen: torch.Tensor, held: int, ranks: int) -> Routes:
        """Return a row of each token for each rank that holds experts of it; the last rows have no meaning.

        Args:
            chosen: int64 [T, k], the experts of each token.
            held: experts of each rank.
            ranks: how many.
        """
        owners = chosen.div(held, rounding_mode="floor")
        # of several choices on one rank the first has the row
        again = (owners.unsqueeze(2) == owners.unsqueeze(1)).tril_(-1).any(2)
        choices, places = cls.of(owners.masked_fill_(again, ranks), ranks + 1)
        return cls(choices[: len(chosen) * min(ranks, chosen.shape[1])], places.masked_fill_(again, len(choices)))

    def rows_of_ranks(self, chosen: torch.Tensor, held: int, ranks: int) -> torch.Tensor:
        """Return how many rows of `to_ranks`, with the same arguments, each rank gets, int64 [ranks]."""
        owners = chosen.div(held, rounding_mode="floor").masked_fill_(self.places >= len(self.choices), ranks)
        return (owners.reshape(-1, 1) == torch.arange(ranks, dtype=owners.dtype, device=owners.device)).sum(0)

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


def summed(rows: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Rows [R, H] added up by token, [T, H]; differentiable."""
    return linear_map(
        rows, lambda rows: sum_of_rows(rows, routes), lambda gradient: gradient.index_select(0, routes.tokens)
    )


def spread_bytes(matrix: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Tokens in FP8, a matrix of T rows or more, as rows [R, C]; not differentiable."""
    if not len(routes.choices):  # kernels are not launched over nothing
        return matrix[:0]
    return gather_rows(matrix, routes.choices, routes.places.shape[1])[0]


def of_rows(weights: torch.Tensor, routes: Routes) -> torch.Tensor:
    """Return the weight of each row, [R], of those of each choice, [T, k]; differentiable."""

    def of_choices(gradient: torch.Tensor) -> torch.Tensor:
        rows = routes.places.clamp(max=len(gradient)).view(-1)
        return F.pad(gradient, (0, 1)).index_select(0, rows).view(routes.places.shape)  # choices without a row get 0

    return linear_map(weights, lambda weights: weights.reshape(-1).index_select(0, routes.choices), of_choices)


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

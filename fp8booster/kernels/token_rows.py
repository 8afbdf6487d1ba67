"""Tokens as the rows of their experts, and sums of the rows that belong to a token, each times a weight.

    rows[r] = tokens[choices[r] // k]                               choice t k + j is the j-th expert of token t
    y[t] = sum over j of weights[t, j] * rows[places[t, j]]         places[t, j] = r where choices[r] = t k + j

A choice that has no row, as it lies on another rank, has a place behind the rows and adds nothing.

A product is rounded to the dtype that torch gives it, a sum is FP32 and rounded once. On a GPU each is one launch that
reads and writes every row once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.cast import in_layouts
from fp8booster.kernels.operators import operator


@operator(rounds_to_fp8=True, writes=("out",))
def gather_rows(
    tokens: Tensor,
    choices: Tensor,
    of_token: int,
    *,
    plain: bool = True,
    transposed: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return rows of FP8 tokens, in the layouts that products read.

    Bytes are moved: what is cast once for each token has the same bytes in each of its rows.

    Args:
        tokens: [T, C] FP8, of one row at least, each of which is contiguous; C and the distance of rows are even.
        choices: int32 [M], contiguous: which choice of a token each row is; -1 where it pads, for a row of zeros.
        of_token: the choices of a token, k.
        plain: give the rows as they lie.
        transposed: give their transpose too, or alone.
        out: [M, C] as the tokens, to which plain rows are written; None: to new memory.

    Returns:
        ([M, C] or empty, [C, M] or empty), FP8, contiguous.
    """
    sources = choices.clamp(min=0).div(of_token, rounding_mode="floor")
    # through uint8: torch copies few FP8 tensors on CPU
    rows = tokens.view(torch.uint8).index_select(0, sources).masked_fill_((choices < 0).unsqueeze(1), 0)
    found, transpose = in_layouts(rows.view(tokens.dtype), plain=plain, transposed=transposed)
    if out is None or not plain:
        return found, transpose
    out.view(torch.uint8).copy_(found.view(torch.uint8))
    return out, transpose


@operator()
def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the weighted sum of each token's rows.

    Args:
        rows: [R, H], contiguous, BF16, FP16 or FP32.
        places: int64 [T, k], contiguous: the rows of each token; R or more where a choice has none.
        weights: [T, k], contiguous; None: ones.

    Returns:
        [T, H] of the rows' dtype.
    """
    of_tokens = _rows_of(rows, places)
    if weights is not None:
        of_tokens = of_tokens * weights.unsqueeze(2)
    return of_tokens.sum(1).to(rows.dtype)


@operator()
def sum_rows_backward(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows and weights.

    Args:
        gradient: [T, H], contiguous: of the sums.
        rows, places, weights: as in `sum_rows`; every row is in `places`, once.

    Returns:
        ([R, H]; [T, k]), each of the dtype of what it is the gradient of.
    """
    of_tokens = _rows_of(rows, places)
    gradient = gradient.to(torch.promote_types(rows.dtype, weights.dtype)).unsqueeze(1)
    drows = (gradient * weights.unsqueeze(2)).to(rows.dtype).view(-1, rows.shape[1])
    dweights = (gradient * of_tokens).sum(2).to(weights.dtype)
    # every row is some token's, once: a copy, where index_add_ would zero and add in no fixed order. Behind them is a
    # row for choices that have none
    made = rows.new_empty(len(rows) + 1, rows.shape[1])
    made.index_copy_(0, places.clamp(max=len(rows)).view(-1), drows)
    return made[:-1], dweights.masked_fill(places >= len(rows), 0)


def _rows_of(rows: Tensor, places: Tensor) -> Tensor:
    """Return the row of each choice, [T, k, H]; zeros where it has none."""
    if not len(rows):
        return rows.new_zeros(*places.shape, rows.shape[1])
    of_tokens = rows.index_select(0, places.clamp(max=len(rows) - 1).view(-1)).view(*places.shape, rows.shape[1])
    return of_tokens.masked_fill_((places >= len(rows)).unsqueeze(2), 0)

"""Bytes that ranks gathered, put in the order in which products read them: as rows of a matrix and as its transpose."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.operators import operator


def gathered_layouts(gathered: Tensor, outer: int, *, plain: bool, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the matrix whose rows ranks hold in pieces, and its transpose.

    With `outer` 1 the ranks' rows follow each other. Else each rank holds a piece of every one of `outer` groups of
    rows, as it does of a batch of sequences: [P, outer, r, C] becomes [outer, P, r, C].

    Args:
        gathered: [P, outer * r, C] bytes, the parts of P ranks, contiguous.
        outer: groups of rows.
        plain: give the matrix.
        transposed: give its transpose.

    Returns:
        ([R16, C] or empty, [C, R16] or empty), where R16 is P * outer * r rounded up to a multiple of 16; zeros lie
        beyond. The matrix is a view of `gathered` where that has its order.
    """
    ranks, rows, columns = gathered.shape
    total = ranks * rows
    data = transpose = gathered.new_empty(0)
    if plain and outer == 1 and total == aligned(total):
        data, plain = gathered.view(total, columns), False  # the ranks' rows follow each other already
    elif plain:
        data = gathered.new_empty(aligned(total), columns)
    if transposed:
        transpose = gathered.new_empty(columns, aligned(total))
    if plain or transposed:
        order(gathered, outer, data if plain else None, transpose if transposed else None)
    return data, transpose


def transposed(matrix: Tensor) -> Tensor:
    """Return the transpose of one FP8 matrix [R, C]: [C, R16], the bytes that a cast under one scale would give."""
    _, transpose = gathered_layouts(matrix.view(torch.uint8).unsqueeze(0), 1, plain=False, transposed=True)
    return transpose.view(matrix.dtype)


@operator(rounds_to_fp8=True)
def order(gathered: Tensor, outer: int, data: Tensor | None, transpose: Tensor | None) -> None:
    """Write the matrix, its transpose or both, as `gathered_layouts` has them."""
    ranks, rows, columns = gathered.shape
    ordered = gathered.view(ranks, outer, rows // outer, columns).transpose(0, 1).reshape(-1, columns)
    for into, matrix in ((data, ordered), (None if transpose is None else transpose.t(), ordered)):
        if into is not None:
            into[: ranks * rows].copy_(matrix)
            into[ranks * rows :].zero_()  # the padding, over which wgrad sums

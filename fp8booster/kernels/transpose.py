"""Bytes that ranks gathered, put in the order in which products read them: as rows of a matrix and as its transpose."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp8booster.kernels.cast import aligned


def gathered_layouts(
    gathered: torch.Tensor, outer: int, *, plain: bool, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrix whose rows ranks hold in pieces, and its transpose.

    With `outer` 1 the ranks' rows follow each other. Else each rank holds a piece of every one of `outer` groups of
    rows, as it does of a batch of sequences: [P, outer, r, C16] becomes [outer, P, r, C16].

    Args:
        gathered: [P, outer * r, C16] bytes, the parts of P ranks, contiguous.
        outer: groups of rows.
        plain: give the matrix.
        transposed: give its transpose.

    Returns:
        ([R16, C16] or empty, [C16, R16] or empty), where R16 is P * outer * r rounded up to a multiple of 16; zeros lie
        beyond. The matrix is a view of `gathered` where that has its order.
    """
    ranks, rows, columns = gathered.shape
    ordered = gathered.view(ranks, outer, rows // outer, columns).transpose(0, 1)
    rows *= ranks
    empty = gathered.new_empty(0)
    padding = aligned(rows) - rows
    data, transpose = empty, empty
    if plain:
        data = (
            F.pad(ordered.reshape(rows, columns), (0, 0, 0, padding))
            if padding
            else ordered.reshape(rows, columns)
        )
    if transposed:
        transpose = gathered.new_empty(columns, rows + padding)
        transpose[:, rows:].zero_()
        into = transpose[:, :rows].unflatten(1, (outer, ranks, -1))
        into.copy_(ordered.permute(3, 0, 1, 2))
    return data, transpose

"""Weights as rows of one matrix in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def lie_together(weights: Sequence[torch.Tensor]) -> bool:
    """Whether weights of as many columns are consecutive rows of one matrix in memory."""
    storage = weights[0].untyped_storage().data_ptr()
    end = weights[0].data_ptr()
    for weight in weights:
        if (
            weight.data_ptr() != end
            or not weight.is_contiguous()
            or weight.untyped_storage().data_ptr() != storage  # neighbours by chance
        ):
            return False
        end += weight.nbytes
    return True


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The matrix that weights which `lie_together` are the rows of; it shares their memory."""
    first = weights[0].detach()
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def one_below_the_other(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Weights of as many columns as one matrix: a view where they lie so in memory already, else a copy."""
    return as_one(weights) if lie_together(weights) else torch.cat([weight.detach() for weight in weights])

"""Weights as rows of one matrix in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.kernels.operators import without_autocast


def are_stacked(weights: Sequence[torch.Tensor]) -> bool:
    """Tell whether weights of as many columns are consecutive rows of one matrix in memory."""
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


def holders(tensor: torch.Tensor) -> int:
    """Return the number of tensors and others that hold the memory of one: equal for all that nobody else holds."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def stacked_view(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the matrix that has weights which `are_stacked` as its rows; it shares their memory."""
    first = _values(weights[0])
    return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())


def stack_rows(weights: Sequence[torch.Tensor], place: torch.Tensor | None = None) -> torch.Tensor:
    """Return weights of as many columns as one matrix: a view where they lie so in memory already, else a copy.

    Args:
        place: for the copy.
    """
    if are_stacked(weights):
        return stacked_view(weights)
    with without_autocast(weights[0].device.type):
        return torch.cat([_values(weight) for weight in weights], out=place)


def stacked_columns(transposes: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the matrix that has transposes of weights as consecutive columns in memory; None: they lie elsewhere."""
    first = transposes[0].detach()
    storage, place = first.untyped_storage().data_ptr(), first.data_ptr()
    for each in transposes:
        if each.data_ptr() != place or each.stride() != first.stride() or each.untyped_storage().data_ptr() != storage:
            return None
        place += each.shape[1] * each.element_size()
    columns = sum(each.shape[1] for each in transposes)
    if first.stride(1) != 1 or columns > first.stride(0):
        return None
    return first.as_strided((first.shape[0], columns), first.stride())


def as_matrix(
    weights: Sequence[torch.Tensor], is_transposed: bool = False, *, place: torch.Tensor | None = None
) -> torch.Tensor:
    """Return weights as the matrix of [sum of N, K] that fprop reads; one of them may lie as [K, N].

    One of [G, N, K] is a matrix of [G * N, K]; where it lies as [G, K, N], of [N, G * K].

    Args:
        place: as in `stack_rows`.
    """
    if len(weights) > 1:
        return stack_rows(weights, place)
    weight = _values(weights[0])
    if weight.dim() > 2:
        weight = weight.flatten(0, -2)
    return weight.t() if is_transposed else weight


def _values(weight: torch.Tensor) -> torch.Tensor:
    # not by its own method: that of a weight which shardformer has sharded copies its layout deeply, each time
    return torch.Tensor.detach(weight)

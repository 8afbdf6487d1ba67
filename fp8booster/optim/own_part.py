"""This rank's part of a DTensor, as FSDP2 makes parameters and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank has of a DTensor, or the tensor if it is none; no gradient flows through it."""
    # the attribute: `to_local` is differentiable, and makes another tensor at each call
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def own_parts(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return the `own_part` of each; at no cost for each where none is a DTensor."""
    return list(map(own_part, tensors)) if DTensor in map(type, tensors) else tensors


def number_of_part(tensor: torch.Tensor) -> int:
    """Return the number of this rank's part among the parts of a DTensor: copies of a part have the same; else 0."""
    number = 0
    if isinstance(tensor, DTensor):
        coordinates = tensor.device_mesh.get_coordinate() or ()
        for place, coordinate, size in zip(tensor.placements, coordinates, tensor.device_mesh.shape, strict=True):
            if not place.is_replicate():  # what FSDP2 shards of a shard is no Shard but a _StridedShard
                number = number * size + coordinate
    return number


def as_part_of(tensor: DTensor, part: torch.Tensor) -> DTensor:
    """Return a DTensor that is spread as another, of which this rank has a part with these values."""
    return DTensor.from_local(
        part.view(tensor._local_tensor.shape),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )

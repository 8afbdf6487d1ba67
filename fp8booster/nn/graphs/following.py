"""Products of gradients that are computed behind the graphs of a backward.

They take no place for their result, and what a graph gives would have to be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8booster.nn.graphs.recorder import Recorder


class FollowingProduct:
    """A product that is computed behind the graphs, of what they have written.

    Args:
        function, tensors, shapes, dtype: as `weights.pinned.Follow` takes them.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        tensors: Sequence[Tensor],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
    ) -> None:
        self._function, self.tensors = function, tensors
        self._numbers = tensors[0].new_empty(len(shapes), dtype=dtype)
        self.stand_ins = [self._numbers[number].expand(shape) for number, shape in enumerate(shapes)]
        """Stand for its gradients in autograd, and have no memory for values."""

    def number_of(self, gradient: Tensor) -> int | None:
        """Return for which of its gradients one stands; None: for none."""
        is_own = gradient.untyped_storage()._cdata == self._numbers.untyped_storage()._cdata
        return int(gradient.storage_offset()) if is_own else None

    def let_go(self, record: Recorder) -> Callable[[], Sequence[Tensor]]:
        """Return what computes it, and holds no memory of graphs."""
        return partial(self._function, *map(record.let_go, self.tensors))


class Followed(NamedTuple):
    """One of the gradients that a product behind the graphs gives."""

    product: int
    number: int


def left_to(following: list[FollowingProduct], *product: Any) -> Sequence[Tensor]:
    """Append a product, and return what stands for its gradients: a `weights.pinned.Follow`."""
    following.append(FollowingProduct(*product))
    return following[-1].stand_ins


def followed_by(following: Sequence[FollowingProduct], gradient: Tensor) -> Followed | None:
    """Return for which gradient of which product one stands; None: it is one itself."""
    for product, each in enumerate(following):
        if (number := each.number_of(gradient)) is not None:
            return Followed(product, number)
    return None

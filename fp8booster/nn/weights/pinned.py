"""FP8 weights that a CUDA graph reads: they stay where they are, and are cast again into the same memory.

A layer that is captured multiplies by the FP8 copies that its sources gave when it ran last. `collected_uses` tells
which these are, `WeightSource.pin` makes them stay, and `copies_are_held` lets the capture find them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeVar

import torch

from fp8booster.kernels.device import is_captured
from fp8booster.nn.weights.casting import Casts

Made = TypeVar("Made")


class Record(Protocol):
    """Captures work of one device."""

    def __call__(self, work: Callable[[], Made]) -> tuple[Callable[[], None], Made]:
        """Return what does the work again, and what the work makes: it has no values before the first time.

        Args:
            work: reads and writes tensors that stay where they are; it gets memory of its own.
        """

    def place_like(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """Return a place with a tensor's shape, type and strides, which all works share: used up in one replay."""


class Pinned(Protocol):
    """An FP8 weight in one place."""

    def refresh(self) -> bool:
        """Lay there what the weights are now, on the current stream; False: it is elsewhere now."""

    def version(self) -> tuple[int, ...]:
        """Changes when an optimizer's step changes the weights."""


class _Source(Protocol):
    is_transient: ClassVar[bool]

    def pin(
        self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool, record: Record
    ) -> Pinned | None: ...


@dataclass(frozen=True, eq=False)
class Use:
    """The arguments with which a layer asked a source."""

    source: _Source
    weights: tuple[torch.Tensor, ...]
    casts: Casts
    transpose: bool

    def pin(self, record: Record) -> Pinned | None:
        """As `WeightSource.pin`."""
        return self.source.pin(self.weights, self.casts, transpose=self.transpose, record=record)


class Follow(Protocol):
    """Leaves gradients to be computed behind the graph."""

    def __call__(
        self,
        function: Callable[..., Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
    ) -> Sequence[torch.Tensor]:
        """Return what stands for the gradients meanwhile, on which nothing may be computed.

        Args:
            function: gives the gradients.
            tensors: that it is called with.
            shapes, dtype: of the gradients.
        """


class Copies:
    """State of the capture that this process makes, inside `copies_are_held`."""

    held = False
    """Copies that were pinned count as fresh."""

    gradient_place: Callable[[tuple[int, int], torch.dtype], torch.Tensor | None] | None = None
    """Gives memory for the gradient of weights, by shape and type, where a graph shall write it; None: as elsewhere."""

    follow: Follow | None = None
    """Leaves a product that takes no place for its result to be computed behind the graph; None: in it."""


def copies_held(tensor: torch.Tensor) -> bool:
    """Tell whether copies that were pinned count as fresh, for work on a tensor."""
    # another thread may run layers of its own meanwhile, and autograd runs backward in another thread: the stream tells
    return Copies.held and (not tensor.is_cuda or is_captured(tensor))


class _Thread(threading.local):
    """The state of a thread: others may run other layers, or the same in evaluation."""

    uses: list[Use] | None = None
    values_were_read = False


collected = _Thread()
"""Collects in this thread: sources that are asked append to `uses`; None where nobody collects. One that lays values in
16 bits elsewhere each time tells that they were read."""


@contextmanager
def collected_uses() -> Iterator[list[Use]]:
    """Yield the list of what sources are asked inside, by this thread; who collects around it gets it too."""
    uses: list[Use] = []
    around, were_read = collected.uses, collected.values_were_read
    collected.uses, collected.values_were_read = uses, False
    try:
        yield uses
    finally:
        collected.uses = around
        if around is not None:
            around += uses
            collected.values_were_read |= were_read


@contextmanager
def copies_are_held(
    gradient_place: Callable[[tuple[int, int], torch.dtype], torch.Tensor | None] | None = None,
) -> Iterator[None]:
    """Inside, copies that were pinned and refreshed count as fresh on every stream, also in a capture.

    Args:
        gradient_place: as `Copies.gradient_place`.
    """
    Copies.held, Copies.gradient_place = True, gradient_place
    try:
        yield
    finally:
        Copies.held, Copies.gradient_place = False, None


@contextmanager
def products_follow(follow: Follow) -> Iterator[None]:
    """Inside, work that is captured leaves products to `follow`."""
    before, Copies.follow = Copies.follow, follow
    try:
        yield
    finally:
        Copies.follow = before

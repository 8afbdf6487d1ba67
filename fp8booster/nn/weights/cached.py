"""FP8 weights that are cast once, and used until the weights change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import FreshCopy
from fp8booster.nn.weights.pinned import Pinned, Record, note_use
from fp8booster.nn.weights.source import WeightSource
from fp8booster.nn.weights.stacking import as_matrix
from fp8booster.tensor import QuantizedMatrix


class CachedWeight(WeightSource):
    """Casts the weights when they are first asked for after a change, as `freshness` sees it: once a step.

    Copies of training and of evaluation, whose casts may scale otherwise, do not serve each other.
    """

    def __init__(self, is_transposed: bool = False) -> None:
        super().__init__(is_transposed)
        self._copy: FreshCopy[QuantizedMatrix] = FreshCopy()
        self._pinned: weakref.ref[PinnedCopy] | None = None

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """As `WeightSource.forward`; cast now unless a fresh copy with the layouts asked for is there."""
        note_use(self, weights, casts, transpose)
        copy = self._copy.get(weights, (casts.config, casts.trains))
        if copy is None or (transpose and not copy.transpose.numel()):
            self.forget()  # first, so that the allocator can give the same memory again
            matrix = as_matrix(weights, self.is_transposed)
            copy = casts.quantize_weight(matrix, transposed=transpose)
            self.put(weights, casts, copy)
        return copy

    def put(self, weights: Sequence[torch.Tensor], casts: Casts, quantized: QuantizedMatrix) -> None:
        """Hold a copy that was just made of weights, as fresh as if `forward` had made it with these casts."""
        self.forget()
        self._copy.put(weights, (casts.config, casts.trains), quantized)

    @property
    def held(self) -> QuantizedMatrix | None:
        """The copy."""
        return self._copy.made

    def forget(self) -> None:
        """Free the copy."""
        self._copy.forget()

    def end_evaluation(self) -> None:
        """As `WeightSource.end_evaluation`; what an engine made stays."""
        self._copy.forget()

    def fresh(self, weights: Sequence[torch.Tensor], casts: Casts) -> QuantizedMatrix | None:
        """Return the copy that serves these casts, if it is fresh."""
        return self._copy.get(weights, (casts.config, casts.trains))

    def pin(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool, record: Record) -> Pinned | None:
        """As `WeightSource.pin`; all graphs of one weight read one copy."""
        pinned = None if self._pinned is None else self._pinned()
        if pinned is None or not pinned.serves(weights, casts, transpose):
            pinned = PinnedCopy(self, weights, casts, transpose, record)
            self._pinned = weakref.ref(pinned)
        return pinned


class PinnedCopy:
    """A copy that a captured cast makes anew, into the same memory.

    Args:
        source: holds the copy after each cast.
        weights, casts, transpose: what is cast, and how.
        record: captures the cast.
    """

    def __init__(
        self, source: CachedWeight, weights: Sequence[torch.Tensor], casts: Casts, transpose: bool, record: Record
    ) -> None:
        self._source, self._weights, self._casts, self._transpose = source, tuple(weights), casts, transpose
        self._places = [weight.data_ptr() for weight in weights]
        self._cast_again, self._made = record(
            lambda: casts.quantize_weight(as_matrix(self._weights, source.is_transposed), transposed=transpose)
        )

    def serves(self, weights: Sequence[torch.Tensor], casts: Casts, transpose: bool) -> bool:
        """Whether it is of these weights where they are now, so cast."""
        return (
            len(weights) == len(self._weights)
            and all(one is other for one, other in zip(weights, self._weights, strict=True))
            and (casts.config, transpose) == (self._casts.config, self._transpose)
            and self._are_there()
        )

    def refresh(self) -> bool:
        """As `Pinned.refresh`."""
        if not self._are_there():
            return False
        if self._source.fresh(self._weights, self._casts) is not self._made:
            self._cast_again()
            self._source.put(self._weights, self._casts, self._made)
        return True

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`."""
        return tuple(weight._version for weight in self._weights)

    def _are_there(self) -> bool:
        return self._places == [weight.data_ptr() for weight in self._weights]

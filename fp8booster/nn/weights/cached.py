"""FP8 weights that are cast once, and used until the weights change."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from fp8booster.config import FP8Config
from fp8booster.nn.weights.casting import REAL_TIME, Casts, quantize_weight
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

    def forward(
        self, weights: Sequence[torch.Tensor], config: FP8Config, *, transpose: bool, casts: Casts = REAL_TIME
    ) -> QuantizedMatrix:
        """As `WeightSource.forward`; cast now unless a fresh copy with the layouts asked for is there."""
        note_use(self, weights, config, transpose, casts)
        in_training = casts is not REAL_TIME
        copy = self._copy.get(weights, (config, in_training))
        if copy is None or (transpose and not copy.transpose.numel()):
            self.forget()  # first, so that the allocator can give the same memory again
            matrix = as_matrix(weights, self.is_transposed)
            copy = quantize_weight(matrix, config, transposed=transpose, casts=casts)
            self.put(weights, config, copy, in_training=in_training)
        return copy

    def put(
        self,
        weights: Sequence[torch.Tensor],
        config: FP8Config,
        quantized: QuantizedMatrix,
        *,
        in_training: bool = True,
    ) -> None:
        """Hold a copy that was just made, as fresh as if `forward` had made it.

        Args:
            weights, config: what it was made from and by.
            quantized: their FP8 matrix.
            in_training: it serves layers in training, otherwise in evaluation.
        """
        self.forget()
        self._copy.put(weights, (config, in_training), quantized)

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

    def fresh(self, weights: Sequence[torch.Tensor], config: FP8Config) -> QuantizedMatrix | None:
        """The copy that serves training, if it is fresh."""
        return self._copy.get(weights, (config, True))

    def pin(
        self,
        weights: Sequence[torch.Tensor],
        config: FP8Config,
        *,
        transpose: bool,
        record: Record,
        casts: Casts = REAL_TIME,
    ) -> Pinned | None:
        """As `WeightSource.pin`; all graphs of one weight read one copy."""
        pinned = None if self._pinned is None else self._pinned()
        if pinned is None or not pinned.serves(weights, config, transpose):
            pinned = PinnedCopy(self, weights, config, transpose, record, casts)
            self._pinned = weakref.ref(pinned)
        return pinned


class PinnedCopy:
    """A copy that a captured cast makes anew, into the same memory.

    Args:
        source: holds the copy after each cast.
        weights, config, transpose, casts: what is cast, and how.
        record: captures the cast.
    """

    def __init__(
        self,
        source: CachedWeight,
        weights: Sequence[torch.Tensor],
        config: FP8Config,
        transpose: bool,
        record: Record,
        casts: Casts,
    ) -> None:
        self._source, self._weights, self._config, self._transpose = source, tuple(weights), config, transpose
        self._places = [weight.data_ptr() for weight in weights]
        self._cast_again, self._made = record(
            lambda: quantize_weight(
                as_matrix(self._weights, source.is_transposed), config, transposed=transpose, casts=casts
            )
        )

    def serves(self, weights: Sequence[torch.Tensor], config: FP8Config, transpose: bool) -> bool:
        """Whether it is of these weights where they are now, so cast."""
        return (
            len(weights) == len(self._weights)
            and all(one is other for one, other in zip(weights, self._weights, strict=True))
            and (config, transpose) == (self._config, self._transpose)
            and self._are_there()
        )

    def refresh(self) -> bool:
        """As `Pinned.refresh`."""
        if not self._are_there():
            return False
        if self._source.fresh(self._weights, self._config) is not self._made:
            self._cast_again()
            self._source.put(self._weights, self._config, self._made)
        return True

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`."""
        return tuple(weight._version for weight in self._weights)

    def _are_there(self) -> bool:
        return self._places == [weight.data_ptr() for weight in self._weights]

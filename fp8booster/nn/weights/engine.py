"""FP8 weights that an engine fills, as ZeRO does after its step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8booster.config import FP8Config
from fp8booster.nn.weights.cached import CachedWeight
from fp8booster.nn.weights.casting import REAL_TIME, Casts
from fp8booster.nn.weights.pinned import Pinned, Record, are_copies_held, note_use
from fp8booster.tensor import QuantizedMatrix


class EngineWeight(CachedWeight):
    """Gives what an engine made together with the weights, until someone else changes them; then it casts them.

    A copy or a pickle of it is a `CachedWeight`.

    Args:
        is_transposed: as in `WeightSource`.
        restore: gives the weights their values in 16 bits again, where the engine keeps none.
    """

    may_be_filled = True

    def __init__(self, is_transposed: bool = False, restore: Callable[[], None] | None = None) -> None:
        super().__init__(is_transposed)
        self._restore = restore
        self.lacks_values = restore is not None

    def fill(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        """Take what an engine made.

        Args:
            weights: what it stands for.
            quantized: their FP8 matrix; the engine writes later values to the same memory.
            ready: recorded behind what writes it, where another stream does.
        """
        self.forget()
        self._filled, self._ready, self._filled_for = quantized, ready, _places(weights)

    def forward(
        self, weights: Sequence[torch.Tensor], config: FP8Config, *, transpose: bool, casts: Casts = REAL_TIME
    ) -> QuantizedMatrix:
        # a capture has other leaves for the weights
        if self._filled is None or not (are_copies_held() or self.is_provided(weights)):
            self._drop()
            return super().forward(weights, config, transpose=transpose, casts=casts)
        note_use(self, weights, config, transpose, casts)
        self.wait()
        return self._filled

    def wait(self) -> None:
        """Let the current stream wait for what fills it, but where that is captured."""
        if self._ready is not None and not are_copies_held():  # a graph cannot wait for what was recorded outside it
            torch.cuda.current_stream().wait_event(self._ready)

    def pin(
        self,
        weights: Sequence[torch.Tensor],
        config: FP8Config,
        *,
        transpose: bool,
        record: Record,
        casts: Casts = REAL_TIME,
    ) -> Pinned | None:
        """As `WeightSource.pin`; what an engine fills stays as it is."""
        if self.is_provided(weights):
            return _PinnedFilling(self, weights, config, transpose)
        return super().pin(weights, config, transpose=transpose, record=record, casts=casts)

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """Whether the engine filled it for the weights as they are."""
        return self._filled is not None and self._filled_for == _places(weights)

    @property
    def held(self) -> QuantizedMatrix | None:
        """What the engine made, or the copy."""
        return super().held if self._filled is None else self._filled

    def forget(self) -> None:
        """Free the copy, and leave what the engine made to the engine."""
        super().forget()
        self._drop()

    def restore_values(self) -> None:
        if self._restore is not None:
            self._restore()

    def _drop(self) -> None:
        self._filled = self._ready = None

    _filled: QuantizedMatrix | None = None
    _ready: torch.cuda.Event | None = None
    _filled_for: list[tuple[int, int]]

    def __reduce__(self) -> tuple:
        return CachedWeight, (self.is_transposed,)


class _PinnedFilling:
    """What an engine fills, as long as it fills the same memory."""

    def __init__(
        self, source: EngineWeight, weights: Sequence[torch.Tensor], config: FP8Config, transpose: bool
    ) -> None:
        self._source, self._weights = source, tuple(weights)
        self._filled = source.forward(weights, config, transpose=transpose)
        self._memory = _addresses(self._filled)

    def refresh(self) -> bool:
        """As `Pinned.refresh`; waits for what fills it."""
        filled = self._source.held
        if filled is None or not self._source.is_provided(self._weights):
            return False
        self._source.wait()
        return filled is self._filled or _addresses(filled) == self._memory

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`."""
        filled = self._source.held
        return () if filled is None else (filled.data._version,)


def _addresses(matrix: QuantizedMatrix) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in matrix)


def _places(weights: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(weight.data_ptr(), weight._version) for weight in weights]

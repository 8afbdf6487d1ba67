"""FP8 weights that an engine fills, as ZeRO does after its step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter, is_

import torch

from fp8booster.kernels.shard_cast import unpack
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import LOOKS, held_copies
from fp8booster.nn.weights.pinned import Copies, Pinned, Record, Use, collected, copies_held
from fp8booster.nn.weights.source import CachedWeight, WeightSource
from fp8booster.nn.weights.stacking import as_matrix
from fp8booster.tensor import QuantizedMatrix


class EngineWeight(CachedWeight):
    """Gives what an engine made together with the weights, while they have its values; else it casts them.

    Where the weights may have been written by someone else, it compares them, once: an average of weights that was
    swapped in is cast, and what the engine made is given again when the weights have their values back.

    A copy or a pickle of it is a `CachedWeight`.

    Args:
        is_transposed: as in `WeightSource`.
        restore: gives the weights their values in 16 bits again, where the engine keeps none.
        keep: gives these weights theirs, and keeps them from then on.
    """

    may_be_filled = True

    _filled: QuantizedMatrix | None = None
    _ready: torch.cuda.Event | None = None

    _is_right: bool = False
    """The weights that were seen last have the values of what the engine made."""

    _seen_at: list[tuple[int, int, int]] | None = None

    _noted: torch.Tensor | None = None
    """Of `note_values`."""

    def __init__(
        self,
        is_transposed: bool = False,
        restore: Callable[[], None] | None = None,
        keep: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(is_transposed)
        self._restore, self._keep = restore, keep
        self.lacks_values = restore is not None

    def fill(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        fill_all([self], [weights], [quantized], ready)

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        # a capture has other leaves for the weights
        if self._filled is None or not ((Copies.held and copies_held(weights[0])) or self.is_provided(weights)):
            return super().forward(weights, casts, transpose=transpose)
        if collected.uses is not None:
            collected.uses.append(Use(self, tuple(weights), casts, transpose))
        self.wait()
        return self._filled

    def wait(self) -> None:
        """Let the current stream wait for what fills it, but where that is captured."""
        if self._ready is None or (Copies.held and self._filled is not None and copies_held(self._filled.data)):
            return  # a graph cannot wait for what was recorded outside it
        torch.cuda.current_stream().wait_event(self._ready)

    def pin(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool, record: Record) -> Pinned | None:
        """As `WeightSource.pin`; what an engine fills stays as it is."""
        if self.is_provided(weights):
            return _PinnedFillings([self], [tuple(weights)], [self.forward(weights, casts, transpose=transpose)])
        return super().pin(weights, casts, transpose=transpose, record=record)

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """Tell whether the weights, as they are, have the values of what the engine made."""
        if self._filled is None:
            return False
        places = _places(weights)
        if places != self._seen_at:
            self._is_right, self._seen_at = self._has_values_of(weights, self._filled), places
            if self._is_right:
                self._copy.forget()
        return self._is_right

    def note_values(self, weights: Sequence[torch.Tensor]) -> None:
        """Remember the weights as they are, which the engine wrote, as other values of what it made last."""
        if self._filled is not None:
            self._noted = _row_hashes(as_matrix(weights, self.is_transposed))

    def _has_values_of(self, weights: Sequence[torch.Tensor], filled: QuantizedMatrix) -> bool:
        """Compare the weights with what the engine made; the host waits for it."""
        without = list(map(_lacks_values, weights))
        if all(without):
            return True  # there is no other value
        if any(weight.device != filled.data.device for weight in weights):
            return False
        self.wait()
        if any(without):  # of several, those that somebody reads without their layers have values
            parts = filled.data.split([len(weight) for weight in weights])
            pairs = zip(weights, parts, without, strict=True)
            return all(lacks or _decodes_to(weight, part, filled.inverse_scale) for weight, part, lacks in pairs)
        matrix = as_matrix(weights, self.is_transposed)
        if _decodes_to(matrix, filled.data, filled.inverse_scale):
            return True
        return self._noted is not None and torch.equal(self._noted, _row_hashes(matrix))

    @property
    def held(self) -> QuantizedMatrix | None:
        """The matrix that the engine made, or the copy."""
        return self._filled if self._is_right else super().held

    def forget(self) -> None:
        """Free the copy; what the engine made counts where it is found to have the weights' values."""
        self._copy.forget()
        self._seen_at, self._is_right = None, False

    def drop(self) -> None:
        """Forget what the engine made: it is of other weights, however near."""
        self.forget()
        self._filled = self._ready = self._noted = None

    def restore_values(self) -> None:
        if self._restore is not None:
            self._restore()

    def keep_values(self) -> None:
        if self._keep is not None:
            self._keep()
            self.was_read, self.lacks_values = True, False

    def __reduce__(self) -> tuple:
        return CachedWeight, (self.is_transposed,)


class _PinnedFillings:
    """Weights that engines fill, as long as they fill the same memory.

    Args:
        sources: of the weights.
        weights: of each source.
        filled: what is given for each.
    """

    def __init__(
        self,
        sources: Sequence[EngineWeight],
        weights: Sequence[tuple[torch.Tensor, ...]],
        filled: Sequence[QuantizedMatrix],
    ) -> None:
        self._sources, self._weights, self._filled = sources, weights, filled
        self._of_all = list(chain.from_iterable(weights))
        self._memory = list(map(_addresses, filled))

    @classmethod
    def joined(cls, parts: Sequence[_PinnedFillings]) -> _PinnedFillings:
        """Return one for the weights of several."""
        sources, weights, filled = zip(*((each._sources, each._weights, each._filled) for each in parts), strict=True)
        return cls(*(list(chain.from_iterable(each)) for each in (sources, weights, filled)))

    def refresh(self) -> bool:
        """Refresh as `Pinned.refresh` does; waits for what fills them."""
        filled = all_filled(self._sources, self._of_all)
        if filled is None:  # one look does not tell
            if not all(map(EngineWeight.is_provided, self._sources, self._weights)):
                return False
            filled = all_filled(self._sources, self._of_all)
        if filled is None:
            return False
        return all(map(is_, filled, self._filled)) or list(map(_addresses, filled)) == self._memory

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`."""
        held = [source._filled if source._is_right else source.held for source in self._sources]
        return tuple([-1 if filled is None else filled.data._version for filled in held])


def pin_all(uses: Iterable[Use], record: Record) -> list[Pinned] | None:
    """Pin the weights of uses; None where one has no place of its own. One look is at all that engines fill."""
    pinned = [use.pin(record) for use in uses]
    fillings = [each for each in pinned if isinstance(each, _PinnedFillings)]
    others = [each for each in pinned if each is not None and not isinstance(each, _PinnedFillings)]
    if len(fillings) + len(others) < len(pinned):
        return None
    return [*others, _PinnedFillings.joined(fillings)] if fillings else others


def fill_all(
    sources: Sequence[WeightSource],
    weights: Sequence[Sequence[torch.Tensor]],
    quantized: Sequence[QuantizedMatrix],
    ready: torch.cuda.Event | None = None,
) -> None:
    """Fill each source as `WeightSource.fill` does; of hundreds of experts Python calls nothing for each.

    Args:
        sources: to fill.
        weights: of each, what it stands for.
        quantized: of each.
        ready: as in `WeightSource.fill`.
    """
    flat = list(chain.from_iterable(weights))
    places, begin = _places(flat), 0
    filled = []
    for source, of_source, matrix in zip(sources, weights, quantized, strict=True):
        end = begin + len(of_source)
        if isinstance(source, EngineWeight):
            source._filled, source._ready, source._is_right, source._noted = matrix, ready, True, None
            # who writes to the weights from now on is seen by their places, and then they are compared
            source._seen_at = places[begin:end]
            filled.append(source._copy)
        else:
            source.fill(of_source, matrix, ready)
        begin = end
    for copy in held_copies(filled):
        copy.forget()


def all_filled(sources: Sequence[WeightSource], weights: Sequence[torch.Tensor]) -> list[QuantizedMatrix] | None:
    """Return what an engine made of each weight, where one look at all shows that every weight has these values still.

    Of hundreds of experts Python calls nothing for each, and the current stream waits once for each event.

    Args:
        sources: of the weights.
        weights: of the first source, of the next, and so on.

    Returns:
        None: ask each source.
    """
    filled = [source for source in sources if isinstance(source, EngineWeight)]
    if len(filled) < len(sources) or not all(map(_IS_RIGHT, filled)):
        return None
    if list(chain.from_iterable(map(_SEEN_AT, filled))) != _places(weights):
        return None
    for source in {id(each._ready): each for each in filled}.values():
        source.wait()
    return list(map(_FILLED, filled))


_IS_RIGHT, _SEEN_AT, _FILLED = attrgetter("_is_right"), attrgetter("_seen_at"), attrgetter("_filled")


def _addresses(matrix: QuantizedMatrix) -> tuple[int, ...]:
    return tuple(0 if each is None else each.data_ptr() for each in matrix)


def _places(weights: Sequence[torch.Tensor]) -> list[tuple[int, int, int]]:
    # of each of hundreds of experts at every call: Python calls no function of its own here
    return [(each.data_ptr(), each._version, getattr(each, LOOKS, 0)) for each in weights]


def _decodes_to(matrix: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor) -> bool:
    """Tell whether FP8 values have the values of a matrix in 16 bits; the host waits for it."""
    values = torch.empty(data.shape, dtype=matrix.dtype, device=matrix.device)
    unpack([data], [inverse_scale], [None], [values])
    return torch.equal(values, matrix)


def _row_hashes(matrix: torch.Tensor) -> torch.Tensor:
    """Return numbers that tell the bits of a matrix from any other's, int64 [rows]."""
    # a copy of the values would be all that leaving out the 16-bit weights saves
    bits = matrix.view({2: torch.int16, 4: torch.int32}[matrix.element_size()])
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, bits.shape[1:], generator=generator, dtype=torch.int64, device="cpu")
    factors = factors.to(bits.device)
    rows = max(1, _HASHED_AT_ONCE // max(1, bits.shape[1]))
    return torch.cat([(part * factors).sum(1) for part in bits.split(rows)])


_HASHED_AT_ONCE = 2**22
"""Values, which take eight bytes each for that long."""


def _lacks_values(weight: torch.Tensor) -> bool:
    """Tell whether the memory of a weight is one value, seen through its shape."""
    return weight.numel() > 1 and not any(weight.stride())

"""FP8 weights of layers whose weights are whole only while the layers run, as under FSDP.

Between forward and backward the weights are shards again. Were their FP8 transpose kept for backward, as layers do
elsewhere, the whole model would lie on every rank. So forward keeps nothing of it, and backward takes the transpose
from the weights that were gathered again: the copy that was gathered in FP8, or a cast made there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8booster.kernels.transpose import transposed
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.pinned import Pinned, Record, Use, collected
from fp8booster.nn.weights.source import BackwardWeight, WeightSource
from fp8booster.nn.weights.stacking import as_matrix
from fp8booster.tensor import QuantizedMatrix


class ReshardedWeight(WeightSource):
    """Holds an FP8 weight only while an engine that gathers in FP8 provides one; else casts at each call.

    A copy or a pickle of it knows no engine.

    Args:
        is_transposed: as in `WeightSource`.
        restore: gives the weights values in 16 bits, where the engine gathers FP8 alone; None: they have values.
    """

    is_transient = True
    may_be_filled = True
    moves = True

    held: QuantizedMatrix | None = None
    """The weights as they were gathered in FP8, until they are shards again."""

    def __init__(self, is_transposed: bool = False, restore: Callable[[], None] | None = None) -> None:
        super().__init__(is_transposed)
        self._restore = restore
        if restore is not None:
            self.lacks_values = self.always = True

    def keep_values(self) -> None:
        """As `WeightSource.keep_values`; they are gone with what was gathered."""
        if self._restore is not None:
            collected.values_were_read = True
            self._restore()

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """Return what was gathered, or a cast made now, without its transpose."""
        if collected.uses is not None:
            collected.uses.append(Use(self, tuple(weights), casts, transpose))
        if self.held is not None:
            # of a layer that stores [K, N] the engine gathers the layout that lies so, the transpose here
            if self.held.data.numel():
                return self.held
            return self.held._replace(data=transposed(self.held.transpose), transpose=self.held.data)
        return casts.quantize_weight(as_matrix(weights, self.is_transposed), transposed=False)

    def backward(self, weights: Sequence[torch.Tensor], casts: Casts) -> BackwardWeight:
        """Return a getter of the transpose of the weights as they are when backward asks."""
        # their memory is freed and filled again, and the tensors still say where they lie
        weights, held = [weight.detach() for weight in weights], self.held_in_backward()

        def backward_weight() -> tuple[torch.Tensor, torch.Tensor]:
            w = held()
            if w is None:
                matrix = as_matrix(weights, self.is_transposed)
                w = casts.quantize_weight(matrix, plain=False, transposed=True)
            return w.transpose if w.transpose.numel() else transposed(w.data), w.scale_of_transpose()

        return backward_weight

    def pin(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool, record: Record) -> Pinned | None:
        """Pin as `WeightSource.pin` does; return None unless the engine gathers into the same memory each time."""
        return None if self.moves or self.held is None else _PinnedGather(self)

    def held_in_backward(self) -> Callable[[], QuantizedMatrix | None]:
        """Return a getter of `held` as it is when backward asks, of the weights that forward read."""
        return lambda: self.held

    def fill(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        """As `WeightSource.fill`, of one layout or both; a layout that is not there is made at each call."""
        self.held = quantized

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """Return True: whatever the mode, `forward` is asked."""
        return True

    def forget(self) -> None:
        """Free what was gathered."""
        self.held = None


class _PinnedGather:
    """A weight that an engine gathers, as long as it gathers into the same memory."""

    def __init__(self, source: ReshardedWeight) -> None:
        self._source = source
        self._memory = self.version()

    def refresh(self) -> bool:
        """As `Pinned.refresh`."""
        return not self._source.moves and self.version() == self._memory

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`: where the weight lies, which backward gathers again."""
        held = self._source.held
        return () if held is None else (held.data.data_ptr(), held.transpose.data_ptr(), held.inverse_scale.data_ptr())

"""The FP8 weight of a layer, in a chunk that is gathered for a forward or a backward at a time.

Nothing of it outlives the chunk between forward and backward: backward makes the layout that dgrad reads when it needs
it, from the chunk that was gathered for it.
"""

from __future__ import annotations

import torch

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.config import FP8Config
from fp8booster.nn.functional import LateWeight
from fp8booster.nn.resharded_weight import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix


class ChunkWeight(ReshardedWeight):
    """A weight of an FP8 chunk, read as it was gathered. A copy or a pickle of it is an empty `ReshardedWeight`.

    Args:
        chunk: gathered whenever the layer computes.
        parameter: the weight.
        is_transposed: it lies as [K, N].
    """

    def __init__(self, chunk: FP8Chunk, parameter: torch.nn.Parameter, is_transposed: bool) -> None:
        super().__init__()
        self._chunk, self._parameter, self._is_transposed = chunk, parameter, is_transposed

    def get(
        self, weight: torch.Tensor, config: FP8Config, *, transposed: bool, is_transposed: bool = False
    ) -> QuantizedMatrix:
        """The FP8 weight as a matrix of [N, K], without its transpose."""
        as_it_lies = self._chunk.quantized(self._parameter)
        if not is_transposed:
            return as_it_lies
        return as_it_lies._replace(data=self._chunk.transpose(self._parameter))

    def in_backward(self, weight: torch.Tensor, config: FP8Config) -> LateWeight:
        """The transpose of the weight as it is gathered then, which must be the one that the forward read."""
        chunk, parameter, changes = self._chunk, self._parameter, self._chunk.changes

        def late_weight() -> tuple[torch.Tensor, torch.Tensor]:
            if chunk.changes != changes:
                raise RuntimeError(
                    "a weight needed for gradient computation has been modified by an inplace operation: it was set "
                    "between this forward and its backward; run backward before the optimizer steps or a checkpoint is "
                    "loaded"
                )
            as_it_lies = chunk.quantized(parameter)
            transpose = as_it_lies.data if self._is_transposed else chunk.transpose(parameter)
            return transpose, as_it_lies.inverse_scale

        return late_weight

    def __deepcopy__(self, memo: dict) -> ReshardedWeight:
        return ReshardedWeight()

    def __reduce__(self) -> tuple:
        return ReshardedWeight, ()

"""FP8 weights in a chunk that is gathered for a forward or a backward at a time.

Nothing of them outlives the chunk between forward and backward: backward makes the layout that dgrad reads when it
needs it, from the chunk that was gathered for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.config import FP8Config
from fp8booster.nn.weights.casting import REAL_TIME, Casts
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import BackwardWeight, WeightSource
from fp8booster.tensor import QuantizedMatrix


class ChunkWeight(WeightSource):
    """Weights of an FP8 chunk, read as they were gathered; several lie stacked by rows there, under one scale.

    A copy or a pickle of it is an empty `ReshardedWeight`.

    Args:
        chunk: gathered whenever the layers compute.
        parameters: the weights.
        is_transposed: as in `WeightSource`.
    """

    is_transient = True
    may_be_filled = True

    def __init__(self, chunk: FP8Chunk, parameters: Sequence[torch.nn.Parameter], is_transposed: bool = False) -> None:
        super().__init__(is_transposed)
        self._chunk, self._parameters = chunk, tuple(parameters)

    @property
    def inverse_scale(self) -> torch.Tensor:
        """As `WeightSource.inverse_scale`; there while the chunk is not."""
        return self._chunk.quantized(self._parameters).inverse_scale

    def forward(
        self, weights: Sequence[torch.Tensor], config: FP8Config, *, transpose: bool, casts: Casts = REAL_TIME
    ) -> QuantizedMatrix:
        """As `WeightSource.forward`, without the transpose.

        Raises:
            RuntimeError: a weight was given other data, which the chunk would not multiply by.
        """
        if not all(map(self._chunk.owns_values_of, self._parameters)):
            raise RuntimeError(
                "the .data of a weight was replaced, and under Gemini its values lie in a chunk; write them with "
                "booster.load_model or the model's load_state_dict"
            )
        stored = self._chunk.quantized(self._parameters)
        if not self.is_transposed:
            return stored
        return stored._replace(data=self._chunk.transpose(self._parameters))

    def backward(
        self, weights: Sequence[torch.Tensor], config: FP8Config, *, casts: Casts = REAL_TIME
    ) -> BackwardWeight:
        """The transpose of the weights as they are gathered then, which must be those that the forward read."""
        chunk, parameters, changes = self._chunk, self._parameters, self._chunk.changes

        def backward_weight() -> tuple[torch.Tensor, torch.Tensor]:
            if chunk.changes != changes:
                raise RuntimeError(
                    "a weight needed for gradient computation has been modified by an inplace operation: it was set "
                    "between this forward and its backward; run backward before the optimizer steps or a checkpoint "
                    "is loaded"
                )
            stored = chunk.quantized(parameters)
            transpose = stored.data if self.is_transposed else chunk.transpose(parameters)
            return transpose, stored.inverse_scale

        return backward_weight

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """True: they exist in FP8 alone."""
        return True

    def __reduce__(self) -> tuple:
        return ReshardedWeight, (self.is_transposed,)

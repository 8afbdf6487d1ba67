"""The FP8 weight of a layer, in a chunk that is gathered for a forward or a backward at a time.

Nothing of it outlives the chunk between forward and backward: backward makes the layout that dgrad reads when it needs
it, from the chunk that was gathered for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.config import FP8Config
from fp8booster.nn.functional import LateWeight
from fp8booster.nn.resharded_weight import ReshardedMergedWeight, ReshardedWeight
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
        as_it_lies = self._chunk.quantized([self._parameter])
        if not is_transposed:
            return as_it_lies
        return as_it_lies._replace(data=self._chunk.transpose([self._parameter]))

    def in_backward(self, weight: torch.Tensor, config: FP8Config) -> LateWeight:
        """The transpose of the weight as it is gathered then, which must be the one that the forward read."""
        return _late_weight(self._chunk, [self._parameter], self._is_transposed)

    def __deepcopy__(self, memo: dict) -> ReshardedWeight:
        return ReshardedWeight()

    def __reduce__(self) -> tuple:
        return ReshardedWeight, ()


class MergedChunkWeight(ReshardedMergedWeight):
    """Weights that lie one below the other in an FP8 chunk, under one scale, read as one matrix as they were gathered.

    Args:
        chunk: gathered whenever the layers compute; the weights share a scale in it.
        parameters: the weights.
    """

    def __init__(self, chunk: FP8Chunk, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._chunk, self._parameters = chunk, tuple(parameters)

    def get(self, weights: Sequence[torch.Tensor], config: FP8Config) -> QuantizedMatrix:
        """The FP8 weight, without its transpose."""
        return self._chunk.quantized(self._parameters)

    def in_backward(self, weights: Sequence[torch.Tensor], config: FP8Config) -> LateWeight:
        """As `ChunkWeight.in_backward`."""
        return _late_weight(self._chunk, self._parameters, False)


def _late_weight(
    chunk: FP8Chunk, parameters: Sequence[torch.nn.Parameter], is_transposed: bool
) -> LateWeight:
    changes = chunk.changes

    def late_weight() -> tuple[torch.Tensor, torch.Tensor]:
        if chunk.changes != changes:
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: it was set "
                "between this forward and its backward; run backward before the optimizer steps or a checkpoint is "
                "loaded"
            )
        as_it_lies = chunk.quantized(parameters)
        transpose = as_it_lies.data if is_transposed else chunk.transpose(parameters)
        return transpose, as_it_lies.inverse_scale

    return late_weight

"""The FP8 copy of a weight and its transpose, made once and used until the weight changes.

When that is: `weights.freshness`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from fp8booster.config import FP8Config
from fp8booster.nn.functional import LateWeight, quantize_weight
from fp8booster.nn.weights.freshness import state_of
from fp8booster.tensor import QuantizedMatrix

if TYPE_CHECKING:
    from fp8booster.nn.layer import FP8Layer


def reusable(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether casts of these tensors made earlier may be used again here.

    Not in code that is being compiled or captured into a CUDA graph: it would keep the first copy for ever. Not for
    tensors made in inference mode: torch does not count their changes. Not in that mode: what is cast there cannot be
    saved for a backward.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or input.is_inference()
        or weight.is_inference()
        or is_captured(input)
    )


def is_captured(tensor: torch.Tensor) -> bool:
    """Whether work on a tensor is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def wait_for(ready: torch.cuda.Event | None) -> None:
    """Make the current stream wait for what writes a weight, if another stream does."""
    if ready is not None:
        torch.cuda.current_stream().wait_event(ready)


Made = TypeVar("Made")


class MadeForStep(Generic[Made]):
    """What is made of the weights of several layers, as fresh as a `WeightCache` of each would be."""

    made: Made | None

    def __init__(self) -> None:
        self.forget()

    def get(self, layers: Sequence[FP8Layer], make: Callable[[], Made], *also: Hashable) -> Made:
        """What `make` gave, or gives now where a weight has changed since.

        Args:
            layers: whose weights it is made of.
            make: makes it.
            also: what else must be as it was.
        """
        made_from = [
            (state_of(layer.weight, layer.fp8_config), layer.fp8_weight.clears, *also) for layer in layers
        ]
        fresh = self._made_from == made_from and all(
            source() is layer.weight for source, layer in zip(self._sources, layers, strict=True)
        )
        if not fresh:
            self.forget()  # first, so that the allocator can give the same memory again
            self.made, self._made_from = make(), made_from
            self._sources = [weakref.ref(layer.weight) for layer in layers]
        return self.made

    def forget(self) -> None:
        """Drop it."""
        self.made = None
        self._made_from: list[tuple] = []
        self._sources: list[weakref.ref] = []


class WeightCache:
    """Holds one layer's FP8 weight. A copy or a pickle of it is empty."""

    clears = 0
    """How often it was told to forget: what else holds a copy of the weight forgets when this has changed."""

    restore: Callable[[], None] | None = None
    """Gives the weight its value in 16 bits again, where an engine keeps none."""

    def __init__(self) -> None:
        self.clear()

    def get(
        self, weight: torch.Tensor, config: FP8Config, *, transposed: bool, is_transposed: bool = False
    ) -> QuantizedMatrix:
        """The FP8 weight as a matrix of [N, K], cast now unless a fresh copy with the layouts asked for is there.

        Args:
            weight: [N, K].
            config: the weight's format and scaling.
            transposed: the transpose is needed too.
            is_transposed: the weight lies as [K, N].
        """
        if self.is_kept_by_engine(weight):
            wait_for(self._ready)
            return self._quantized
        fresh = (
            self._source is not None
            and self._source() is weight
            and self._made_from == state_of(weight, config)
            and (self._quantized.transpose.numel() or not transposed)
        )
        if not fresh:
            self.clear()  # first, so that the allocator can give the same memory again
            matrix = weight.t() if is_transposed else weight
            self.put(weight, config, quantize_weight(matrix, config, transposed=transposed))
        return self._quantized

    def put(self, weight: torch.Tensor, config: FP8Config, quantized: QuantizedMatrix) -> None:
        """Hold a copy that was just made from a weight, as fresh as if `get` had made it.

        Args:
            weight, config: what it was made from and by.
            quantized: the FP8 weight.
        """
        self.clear()
        self._quantized, self._source = quantized, weakref.ref(weight)
        self._made_from = state_of(weight, config)

    def keep(
        self, weight: torch.Tensor, quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        """Hold a copy that an engine makes together with the weight, until the weight is changed by someone else.

        Args:
            weight: the weight that it stands for.
            quantized: the FP8 weight with its transpose; the engine writes later values to the same memory.
            ready: recorded behind what writes the copy, where another stream does.
        """
        self._quantized, self._source, self._ready = quantized, weakref.ref(weight), ready
        self._kept_for = (weight.data_ptr(), weight._version)

    def is_kept_by_engine(self, weight: torch.Tensor) -> bool:
        """Whether an engine made the copy together with the weight as it is."""
        return self._kept_for == (weight.data_ptr(), weight._version)

    def in_backward(self, weight: torch.Tensor, config: FP8Config) -> LateWeight | None:
        """Where backward shall get the weight's transpose; None: autograd keeps that which `get` gave."""
        return None

    def clear(self) -> None:
        """Forget the copy."""
        self.clears += 1
        self._kept_for: tuple[int, int] | None = None
        self._source: weakref.ref | None = None
        self._made_from: tuple | None = None
        self._quantized: QuantizedMatrix | None = None
        self._ready: torch.cuda.Event | None = None

    def __deepcopy__(self, memo: dict) -> WeightCache:
        return type(self)()

    def __reduce__(self) -> tuple:
        return type(self), ()

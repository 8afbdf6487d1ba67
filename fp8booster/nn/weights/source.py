"""One contract for all sources of FP8 weights, and the usual source: a cast that is kept until a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from fp8booster.kernels.blockwise_cast import transposed_blocks
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import FreshCopy, captured_without_copies, note_change
from fp8booster.nn.weights.pinned import Pinned, Record, Use, collected
from fp8booster.nn.weights.stacking import are_stacked, as_matrix
from fp8booster.tensor import QuantizedMatrix

BackwardWeight = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Gives backward the FP8 transpose of the weight, [K16, N16], and its inverse scale."""


class WeightSource:
    """Gives the FP8 matrix of one weight, or of several of one width stacked by rows.

    A lone layer has a source of one weight; layers that are multiplied as one share a source of all their weights.

    The weights are given at each call, for what a layer's weight is may change from call to call: a view of what FSDP
    gathered, a node that Gemini puts into the graph, a tensor that is computed for each forward. So a source keeps no
    layer alive, and a copy or a pickle of it is empty.

    Args:
        is_transposed: the one weight lies as [K, N], not as nn.Linear's does.
    """

    is_transient: ClassVar[bool] = False
    """The weights are whole only while their layers run."""

    moves: bool = False
    """What is given may lie elsewhere at each call, where no CUDA graph finds it."""

    always: bool = False
    """The layers compute in FP8 for any number of tokens: an engine keeps no 16-bit values to compute from, or all of
    its ranks must do alike."""

    lacks_values: bool = False
    """The weights may have no values in 16 bits until `restore_values`."""

    was_read: bool = False
    """The weights have values in 16 bits because somebody reads them without their layers (`keep_values`)."""

    may_be_filled: ClassVar[bool] = False
    """An engine may cast the weights."""

    why_not_replaced: str | None = None
    """Why another source cannot take this one's place, as where an engine gathers the weights for it alone."""

    refusal: str | None = None
    """Why the weights cannot be stacked, as an engine found; their layers run one by one."""

    def __init__(self, is_transposed: bool = False) -> None:
        self.is_transposed = is_transposed

    @property
    def held(self) -> QuantizedMatrix | None:
        """The FP8 matrix that takes memory now, fresh or not."""
        return None

    @property
    def inverse_scale(self) -> torch.Tensor | None:
        """Undoes the scale of the weights that layers multiply by now, float32; None where none are held."""
        return None if self.held is None else self.held.inverse_scale

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """Return the matrix of [sum of N, K] that fprop reads; the current stream waits for what fills it.

        Args:
            weights: [N, K] each.
            casts: the layer's, by which the source casts.
            transpose: wanted too; one that `backward` gives is left out.
        """
        raise NotImplementedError

    def backward(self, weights: Sequence[torch.Tensor], casts: Casts) -> BackwardWeight | None:
        """Return the source of the transpose for dgrad; None: autograd saves that of what `forward` gave."""
        return None

    def for_call(self, weight: torch.Tensor, casts: Casts, input: torch.Tensor, again: bool = False) -> QuantizedMatrix:
        """Return the matrix for one call: `forward`'s, or a cast for it alone where none can be kept.

        Args:
            weight: the only one.
            casts: the layer's, in training or in evaluation.
            input: the other operand.
            again: both are known to be `reusable`.
        """
        for_backward = torch.is_grad_enabled() and input.requires_grad
        if not again and (torch.compiler.is_compiling() or weight.is_inference() or captured_without_copies(input)):
            return casts.quantize_weight(as_matrix([weight], self.is_transposed), transposed=for_backward)
        # what an engine provides may be all that there is of the weight, and has the transposes that it has
        if casts.in_training or self.is_provided([weight]):
            # a checkpointed forward runs without gradients first: with the transpose now, it is not cast twice
            for_backward = casts.config.keeps_transposes
        if not torch.is_inference_mode_enabled():
            return self.forward([weight], casts, transpose=for_backward)
        with torch.inference_mode(False):  # what is cast here may be read by a forward that autograd sees
            return self.forward([weight], casts, transpose=for_backward)

    def notes_of_scaling(self, casts: Casts) -> list[str]:
        """Return what the report says of scales that do not come from the tensors that are cast."""
        if casts.state is None or casts.by_channel:
            return []
        note = f"{casts.scaling.name} scales"
        return [f"{note}, real-time ones of a weight that an engine casts" if self.may_be_filled else note]

    def pin(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool, record: Record) -> Pinned | None:
        """Let what `forward` gives stay in one place, for a CUDA graph; None: it cannot, as where it is gathered.

        Args:
            weights, casts, transpose: as in `forward`.
            record: captures a cast.
        """
        return None

    def fill(
        self, weights: Sequence[torch.Tensor], quantized: QuantizedMatrix, ready: torch.cuda.Event | None = None
    ) -> None:
        """Take what an engine made.

        Args:
            weights: what it stands for.
            quantized: their FP8 matrix; the engine writes later values to the same memory.
            ready: recorded behind what writes it, where another stream does.
        """
        raise NotImplementedError

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """Tell whether an engine gives the matrix of the weights as they are; then `forward` is asked in every mode."""
        return False

    def invalidate(self, weights: Sequence[torch.Tensor]) -> None:
        """The weights were changed unseen: forget what was made of them, here and in every other source."""
        self.forget()
        note_change(weights)

    def forget(self) -> None:
        """Free what is held."""

    def end_evaluation(self) -> None:
        """Free what was cast in evaluation: what is evaluated next may be others' values, written unseen."""

    def restore_values(self) -> None:
        """Give the weights their values in 16 bits again, where an engine keeps none."""

    def keep_values(self) -> None:
        """Give the weights values in 16 bits, and let them keep these: somebody reads them without their layers."""
        self.restore_values()

    def __reduce__(self) -> tuple:
        return type(self), (self.is_transposed,)


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
        if collected.uses is not None:
            collected.uses.append(Use(self, tuple(weights), casts, transpose))
        copy = self._copy.get(weights, (casts.config, casts.in_training))
        if copy is None or (transpose and not copy.transpose.numel()):
            self.forget()  # first, so that the allocator can give the same memory again
            matrix = as_matrix(weights, self.is_transposed)
            copy = casts.quantize_weight(matrix, transposed=transpose)
            self.put(weights, casts, copy)
        return copy

    def put(self, weights: Sequence[torch.Tensor], casts: Casts, quantized: QuantizedMatrix) -> None:
        """Hold a copy that was just made of weights, as fresh as if `forward` had made it with these casts."""
        self.forget()
        self._copy.put(weights, (casts.config, casts.in_training), quantized)

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
        return self._copy.get(weights, (casts.config, casts.in_training))

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
        matrix = as_matrix(self._weights, source.is_transposed)
        if len(weights) > 1 and not are_stacked(weights):
            # each graph would keep memory for the rows, which are needed only while it casts them
            matrix = record.place_like(matrix, 0)
        self._cast_again, self._made = record(
            lambda: casts.quantize_weight(
                as_matrix(self._weights, source.is_transposed, place=matrix), transposed=transpose
            )
        )
        self._cast_of = self.version()

    def serves(self, weights: Sequence[torch.Tensor], casts: Casts, transpose: bool) -> bool:
        """Tell whether it is of these weights where they are now, so cast."""
        return (
            len(weights) == len(self._weights)
            and all(one is other for one, other in zip(weights, self._weights, strict=True))
            and (casts.config, transpose) == (self._casts.config, self._transpose)
            and self._are_there()
        )

    def refresh(self) -> bool:
        """As `Pinned.refresh`."""
        # what an engine gives from its first step on needs no cast, nor the memory of a copy
        if not self._are_there() or self._source.is_provided(self._weights):
            return False
        if self._source.fresh(self._weights, self._casts) is not self._made:
            # into the memory that graphs read: they hold addresses, no tensors
            self._cast_again()
            if (version := self.version()) != self._cast_of:
                # for an eager backward that has waited since before a step; a replay raises no version
                torch.autograd.graph.increment_version([each for each in self._made if each is not None])
                self._cast_of = version
            self._source.put(self._weights, self._casts, self._made)
        return True

    def version(self) -> tuple[int, ...]:
        """As `Pinned.version`."""
        return tuple(weight._version for weight in self._weights)

    def _are_there(self) -> bool:
        return self._places == [weight.data_ptr() for weight in self._weights]


class FrozenWeight(WeightSource):
    """Gives the matrix that a layer holds, which no longer changes and is all that there is of the weight.

    Args:
        quantized: under any scales, without its transpose.
    """

    lacks_values = True
    refusal = "their weights are kept in FP8 alone"

    def __init__(self, quantized: QuantizedMatrix) -> None:
        super().__init__()
        self._quantized = quantized

    @property
    def held(self) -> QuantizedMatrix:
        """The matrix."""
        return self._quantized

    def forward(self, weights: Sequence[torch.Tensor], casts: Casts, *, transpose: bool) -> QuantizedMatrix:
        """As `WeightSource.forward`; the transpose is left to `backward`."""
        return self._quantized

    def backward(self, weights: Sequence[torch.Tensor], casts: Casts) -> BackwardWeight:
        """As `WeightSource.backward`."""
        return transposed_in_backward(self._quantized)

    def is_provided(self, weights: Sequence[torch.Tensor]) -> bool:
        """As `WeightSource.is_provided`."""
        return True


def transposed_in_backward(quantized: QuantizedMatrix) -> BackwardWeight:
    """The transpose of a weight that forward multiplies by, made when backward asks.

    Args:
        quantized: without its transpose; an engine may write later values to the same memory. Scales of rows are left
            to who multiplies by it.

    Raises:
        RuntimeError, when the transpose is asked for: the weight has changed since.
    """
    data, version = quantized.data, quantized.data._version

    def backward_weight() -> tuple[torch.Tensor, torch.Tensor]:
        if data._version != version:
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: an optimizer "
                "stepped between this forward and its backward; run backward before the step"
            )
        if quantized.inverse_scale.dim() == 2:
            return transposed(data), transposed_blocks(quantized.inverse_scale, *data.shape)
        if quantized.has_row_scales:
            # these lie along the sum of dgrad: who multiplies has them in the output's gradient already
            return transposed(data), quantized.inverse_scale.new_ones(())
        return transposed(data), quantized.scale_of_transpose()

    return backward_weight

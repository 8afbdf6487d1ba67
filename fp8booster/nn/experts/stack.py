"""The weights of one layer of all experts of a rank, stacked for grouped products, and the experts as two of these.

    tokens -- cast, laid out by expert --> up --> activation, times the router's weights --> down -- summed --> tokens

Where the weights lie is all that differs between experts that are modules (`grouped`) and those in parameters of three
dimensions (`fp8_experts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_
from typing import cast

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.grouped_product import Groups
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.experts.alike import Stack
from fp8booster.nn.experts.fp8_rows import Rows, read_of
from fp8booster.nn.experts.grouped_linear import GroupedWeight, Products, cast_experts, grouped_linear, under_one_scale
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import FreshCopy
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.nn.weights.source import BackwardWeight, WeightSource
from fp8booster.nn.weights.stacking import are_stacked, stack_rows, stacked_columns, stacked_view
from fp8booster.tensor import QuantizedMatrix

EXPERTS_THAT_PAY = 8
"""So many experts were faster grouped in FP8 than one by one in BF16, whatever their size
(benchmarks/results/h200/experts_NVIDIA-H200_2026-11-21_torch-2.11.0-cu130.md). Fewer are grouped where
`speed_model.computes_in_fp8` finds FP8 faster for their rows as one product."""


NOT_BF16 = "grouped products give BF16 alone"


def run_stacks(
    tokens: Rows,
    reads: RowLayout,
    up: WeightStack,
    activation: Callable[[torch.Tensor], torch.Tensor],
    down: WeightStack,
    sums: RowLayout,
) -> torch.Tensor:
    """Return what experts make of tokens, summed over the rows of each, BF16.

    Args:
        tokens: [T, H] BF16.
        reads: lays them out.
        up, down: the products.
        activation: from rows of one to those of the other. The routers' weights are its matter: of rows that are
            multiplied before the last product, the sum is of what that gives.
        sums: `reads`, or the same rows by choice.
    """
    # by one name: what autograd does not save is freed before the next one is made
    x = up.product(tokens, reads.groups, reads=reads)
    x = activation(x)
    return down.product(x, reads.groups, sums=sums)


def why_not_stacked(config: FP8Config, sizes: Iterable[int], scales: str | None) -> str | None:
    """Return why experts do not compute in grouped products, whatever their tokens; None where they can.

    Args:
        config: of all their layers.
        sizes: input and output features.
        scales: finer ones than grouped products can read; None: they can.
    """
    if any(size % ALIGNMENT for size in sizes):
        return f"a size is no multiple of {ALIGNMENT}"
    if scales is not None:
        return scales
    if config.input_format is not E4M3 or config.weight_format is not E4M3:
        return "grouped products multiply E4M3 alone"
    return None


def why_not_bf16(tokens: torch.Tensor, *weights: torch.Tensor) -> str | None:
    """Return why experts do not give BF16 of tokens; None where they do, as under autocast, which asks for it."""
    device = tokens.device.type
    if torch.is_autocast_enabled(device):
        dtypes = {torch.get_autocast_dtype(device)}
    else:
        dtypes = {tokens.dtype, *(weight.dtype for weight in weights)}
    return None if dtypes == {torch.bfloat16} else NOT_BF16


def rows_that_decide(rows: int, in_training: bool) -> int | None:
    """Return the rows by which experts that are spread over ranks choose how they run; None: whatever they are.

    Each rank gets other rows. Where there is a backward, all must choose alike: grouped products send the gradient of
    the rows before those of weights are there to be reduced over other ranks, experts one by one after that, and ranks
    that do both in different orders wait for each other for ever. In training without gradients, as before layers are
    computed again for backward, experts run as they will then.
    """
    return None if in_training or torch.is_grad_enabled() else rows


def pays(
    config: FP8Config, experts: int, rows: float, features: tuple[int, int], device: torch.device, *, always: bool
) -> bool:
    """Tell whether grouped products of so many rows in all are faster in FP8.

    Args:
        config: of the layers.
        experts: how many have weights.
        rows: of all experts.
        features: inputs and outputs of the first product.
        device: of the weights.
        always: the weights are in FP8 alone, or the configuration asks for it.
    """
    return experts >= EXPERTS_THAT_PAY or always or computes_in_fp8(config, int(rows), *features, device)


class StackCopy:
    """Holds the FP8 weights of a stack while they are right.

    Weights that an engine provides stay as they are, with their scales; the parameters may hold no values then. Where
    they lie in memory of their own each, they are copied, once a step: one byte a value more, and one for the
    transpose, unless that is made in backward. Other weights are cast once a step.
    """

    def __init__(self) -> None:
        self._copy: FreshCopy[GroupedWeight] = FreshCopy()
        self._views: tuple[list[QuantizedMatrix], GroupedWeight] | None = None

    @property
    def made(self) -> GroupedWeight | None:
        """Return the copy that is held, fresh or not."""
        return self._copy.made if self._views is None else self._views[1]

    def get(
        self, stack: Stack, experts: int, casts: Casts, provided: bool, filled: list[QuantizedMatrix] | None = None
    ) -> GroupedWeight:
        """Return the FP8 weights.

        Args:
            stack: by expert, as many layers of each.
            experts: how many.
            casts: of the layers as one.
            provided: an engine gives their FP8 weights.
            filled: these, where they are known already.
        """
        if torch.is_inference_mode_enabled():
            # what is cast here may be read by a forward that autograd sees
            with torch.inference_mode(False), torch.no_grad():
                return self._get(stack, experts, casts, provided, filled)
        return self._get(stack, experts, casts, provided, filled)

    def _get(
        self, stack: Stack, experts: int, casts: Casts, provided: bool, filled: list[QuantizedMatrix] | None
    ) -> GroupedWeight:
        weights, parts = stack.weights, (filled or _provided(stack, casts)) if provided else None
        if self._views is not None:
            # an engine writes the weights of each step to the same memory
            if parts is not None and all(map(is_, parts, self._views[0])):
                return self._views[1]
            self._views = None
        # an engine may begin to provide weights between two steps, and then their scales are others
        key = casts.config, casts.in_training, provided
        quantized = self._copy.get(weights, key)
        if quantized is not None:
            return quantized
        self._copy.forget()  # first, so that the allocator can give the same memory again
        if parts is None:
            return self._copy.put(weights, key, cast_experts(weights, casts))
        made, are_views = _joined(parts, experts, transposed_too=casts.config.keeps_transposes)
        if not are_views:
            return self._copy.put(weights, key, made)
        self._views = parts, made
        return made


def _provided(stack: Stack, casts: Casts) -> list[QuantizedMatrix]:
    """Return the FP8 matrix of each weight that an engine provides, asking for each."""
    pairs = zip(map(_SOURCE, stack.layers), stack.weights, strict=True)
    return [source.forward([weight], casts, transpose=False) for source, weight in pairs]


_SOURCE = attrgetter("fp8_weight")


def weights_of_call(stack: Stack, experts: int, casts: Casts, provided: bool) -> tuple[GroupedWeight, BackwardWeight]:
    """Return the FP8 weights of layers that are whole only while they run, and what gives backward the transpose.

    That is made of the weights that are whole then: nothing of them is kept in between.

    Args:
        stack, experts, casts, provided: as in `StackCopy.get`.
    """
    if not provided:
        # their memory is freed and filled again, and the tensors still say where they lie
        values = [weight.detach() for weight in stack.weights]

        def cast_again() -> tuple[torch.Tensor, torch.Tensor]:
            w = casts.quantize_stack(values, plain=False, transposed=True)
            return w.transpose, w.inverse_scale

        return under_one_scale(casts.quantize_stack(values, transposed=False)), cast_again
    made, _ = _joined(_provided(stack, casts), experts, transposed_too=False)
    later = [cast(ReshardedWeight, source).held_in_backward() for source in map(_SOURCE, stack.layers)]

    def transpose() -> tuple[torch.Tensor, torch.Tensor]:
        held = (cast(QuantizedMatrix, get()) for get in later)
        return transposed(_stacked([matrix.data for matrix in held])), made.inverse_scales

    return made, transpose


def _joined(parts: Sequence[QuantizedMatrix], experts: int, *, transposed_too: bool) -> tuple[GroupedWeight, bool]:
    """Stack FP8 matrices by rows, as many of each expert; tell whether all of it is views of their memory."""
    data, transposes, scales, _ = map(list, zip(*parts, strict=True))
    in_each = len(parts) // experts
    # those that an engine gathers as one have one scale; then the gradient of their input is one product
    firsts = [scales[number // in_each * in_each] for number in range(len(scales))]
    if all(scale.data_ptr() == first.data_ptr() for scale, first in zip(scales, firsts, strict=True)):
        scales = scales[::in_each]
    rows = [scale.view(1, 1) for scale in scales]
    are_views = are_stacked(data) and are_stacked(rows)
    stacked = _stacked(data)
    transpose = stacked.new_empty(0)
    if transposed_too:
        columns = stacked_columns(transposes)
        are_views &= columns is not None
        transpose = transposed(stacked) if columns is None else columns
    return GroupedWeight(stacked, transpose, stack_rows(rows).view(experts, -1)), are_views


def _stacked(data: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return FP8 matrices as rows of one: a view where they lie so, else a copy."""
    if are_stacked(data):
        return stacked_view(data)
    # through uint8: torch copies few FP8 tensors on CPU
    return torch.cat([part.view(torch.uint8) for part in data]).view(data[0].dtype)


Quantized = Callable[[torch.Tensor], tuple[GroupedWeight, BackwardWeight | None]]
"""Gives the FP8 weights of a product with an operand, and what gives backward the transpose; None: these hold it."""


def of_parameter(weight: torch.Tensor, source: WeightSource, casts: Casts) -> Quantized:
    """Return what gives the FP8 weights of a parameter that holds a weight of each expert, under one scale.

    Args:
        weight: [G, N, K], or [G, K, N] where the source's weights are transposed.
        source: gives its FP8 copy.
        casts: of the product.
    """

    def quantized(x: torch.Tensor) -> tuple[GroupedWeight, BackwardWeight | None]:
        # one scale for all experts: a product has one for each expert's block, and an engine casts a parameter whole
        w = under_one_scale(source.for_call(weight, casts, x), source.is_transposed)
        return w, source.backward([weight], casts)

    return quantized


class WeightStack:
    """The weights of one layer of all experts, such as gate and up.

    Args:
        weights: by expert, as many of each; or one parameter with all of them.
        casts: of the product.
        quantized: gives their FP8 copy.
        factor: multiplies the gradients of the weights, and not those of x.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], casts: Casts, quantized: Quantized, factor: float = 1.0
    ) -> None:
        self._weights, self._casts, self._quantized, self.factor = weights, casts, quantized, factor

    def look_up(self, tokens: torch.Tensor) -> None:
        """Get the FP8 weights before they are multiplied."""
        found = self._quantized(tokens)
        self._quantized = lambda _: found

    def product(
        self, x: Rows, groups: Groups, *, reads: RowLayout | None = None, sums: RowLayout | None = None
    ) -> torch.Tensor:
        """Return each expert's product on its rows, [M, N] BF16, differentiable.

        Args:
            x: [M, K] BF16.
            groups: of the M rows.
            reads: x are tokens, [T, K], which may be in FP8 alone, laid out so; None: rows.
            sums: what is returned is summed over the rows of each token, [T, N]; None: rows.
        """
        w, backward_weight = self._quantized(read_of(x))
        how = Products(groups, self._casts, self.factor, backward_weight, reads=reads, sums=sums)
        return grouped_linear(x, self._weights, w, how)

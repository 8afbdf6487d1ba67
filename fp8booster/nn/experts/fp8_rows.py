"""Rows in FP8 alone: tokens that were cast once, for the first product of their experts, before they were sent.

    tokens [T, H] -- cast --> [T, C] FP8 -- k rows of each --> [T k, B] bytes -- sent --> [R, B] bytes --> first product

A row has the bytes that its token's cast has, behind them the scales of the row where it has its own. No copy of a row
in 16 bits is made, or kept for backward, unless what runs the experts asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8booster.nn.linear.functional import linear_map
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax
from fp8booster.scaling import INPUT
from fp8booster.tensor import QuantizedMatrix

Back = Callable[[torch.Tensor], torch.Tensor]


def why_not_before_sending(casts: Casts) -> str | None:
    """Return why tokens cannot be cast before they are sent to products whose inputs these cast; None: they can.

    The rows that one product reads come from several ranks, and have the scales that their senders gave them. One scale
    for all of them must follow from the amax of all, on which the ranks agree, whatever else a rank has seen.
    """
    dtype = casts.config.format_of[INPUT]
    if casts.state is None or casts.scaling.fixed_amax(INPUT, dtype) is not None:
        return None
    return f"{casts.scaling.name} scales"


@dataclass(frozen=True, eq=False)
class FP8Rows:
    """Rows [R, H] that exist in FP8 alone."""

    handle: torch.Tensor
    """[R, H], through whose shape one NaN shows: it receives the gradient of the rows' values."""

    matrix: QuantizedMatrix
    """[R, C], of one row at least, C columns of which H count."""

    amax: torch.Tensor | None
    """Float32 [], by which all values are scaled; None: rows have scales of their own."""

    def __len__(self) -> int:
        return len(self.handle)

    def to(self, dtype: torch.dtype) -> FP8Rows:
        """Return rows whose gradient comes in another dtype."""
        if dtype is self.handle.dtype:
            return self
        # backward shall not hold the rows
        shape, before = self.handle.shape, self.handle.dtype
        handle = linear_map(
            self.handle, lambda handle: nothing_of(handle, dtype).expand(shape), lambda gradient: gradient.to(before)
        )
        return FP8Rows(handle, self.matrix, self.amax)

    def values(self) -> torch.Tensor:
        """Return the values, [R, H], differentiable."""
        dtype, shape = self.handle.dtype, self.handle.shape
        return linear_map(self.handle, lambda _: self.matrix.dequantize(*shape).to(dtype), lambda gradient: gradient)


def shown_as(rows: torch.Tensor | FP8Rows) -> torch.Tensor:
    """Return a tensor that has the shape, dtype and device of rows, and their gradient."""
    return rows.handle if isinstance(rows, FP8Rows) else rows


def values_of(rows: torch.Tensor | FP8Rows) -> torch.Tensor:
    """Return the values of rows, [R, H], in high precision, differentiable."""
    return rows.values() if isinstance(rows, FP8Rows) else rows


def with_amax(values: torch.Tensor, rows: torch.Tensor | FP8Rows) -> torch.Tensor:
    """Return some values of rows, a tensor just made; a cast to the rows' format and scale gives their bytes again."""
    return deliver_amax(values, rows.amax) if isinstance(rows, FP8Rows) else values


def received_rows(
    tokens: torch.Tensor,
    rows: torch.Tensor,
    cast: QuantizedMatrix,
    nothing: torch.Tensor,
    amax: torch.Tensor | None,
    back: Back,
) -> FP8Rows:
    """Return rows as they came, differentiable.

    Args:
        tokens: [T, H], of this rank, which get the gradients of the rows that were sent for them.
        rows: [R, B], of what `packed` made.
        cast: this rank's cast of its tokens; all ranks' are alike.
        nothing: `nothing_of` the tokens.
        amax: as in `FP8Rows`.
        back: from the gradient of the rows, [R, H], to that of the tokens.
    """
    shape = torch.Size((len(rows), tokens.shape[1]))
    handle = linear_map(tokens, lambda _: nothing.expand(shape), back)
    # kernels read no empty matrix: without a row that came, one of no meaning
    return FP8Rows(handle, _unpacked(rows if len(rows) else rows.new_empty(1, rows.shape[1]), cast), amax)


def nothing_of(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return one NaN, [1, 1], to be shown through the shape of rows that are made of tokens."""
    return tokens.new_full((1, 1), torch.nan, dtype=dtype)


def packed(cast: QuantizedMatrix) -> torch.Tensor:
    """Return each row of a cast with its scales, where it has its own, in one row of bytes, [R, B], of its format."""
    scales = cast.inverse_scale
    if scales.dim() == 0:
        return cast.data
    scales = scales.unsqueeze(1) if scales.dim() == 1 else scales.t()
    parts = [cast.data.view(torch.uint8), scales.contiguous().view(torch.uint8)]
    return torch.cat(parts, 1).view(cast.data.dtype)


def _unpacked(rows: torch.Tensor, like: QuantizedMatrix) -> QuantizedMatrix:
    """Return the matrix whose rows `packed` gave, or some of these in any order."""
    dimensions, columns = like.inverse_scale.dim(), like.data.shape[1]
    if dimensions == 0:
        return QuantizedMatrix(rows, like.transpose, like.inverse_scale, None)
    data, scales = (part.contiguous() for part in rows.view(torch.uint8).tensor_split([columns], 1))
    scales = scales.view(torch.float32)
    scales = scales.squeeze(1) if dimensions == 1 else scales.t().contiguous()
    return QuantizedMatrix(data.view(rows.dtype), like.transpose, scales, None)

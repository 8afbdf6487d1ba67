"""Rows in FP8 alone: tokens that were cast once, for the first product of their experts, before they were sent.

    tokens [T, H] -- cast --> [T, C] FP8 -- a row for each rank --> [S, B] bytes -- sent --> [R, B] bytes --> product

A row has the bytes that its token's cast has, behind them the scales of the row where it has its own. No copy of a row
in 16 bits is made, or kept for backward, unless what runs the experts asks for it. Autograd sees no rows: what reads
them is a function of the tokens, sends the gradient of the rows back, and computes that of its weights meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fp8booster.nn.linear.functional import linear_map
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax
from fp8booster.scaling import INPUT
from fp8booster.tensor import QuantizedMatrix

SendBack = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Sends the gradient of rows back, [R, H], and gives what waits for the gradient of the tokens that they were made of.
All ranks send at once, and wait at once."""


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
    """Rows [R, H] that exist in FP8 alone, to be read once."""

    tokens: torch.Tensor
    """[T, H], of this rank, which get the gradients of the rows that were sent for them."""

    send_back: SendBack
    matrix: QuantizedMatrix
    """[R, C], of one row at least, C columns of which H count; each row of its data is contiguous."""

    count: int
    """Number of rows, R."""

    dtype: torch.dtype
    """Type of their values, and of the gradient that goes back."""

    amax: torch.Tensor | None
    """Float32 [], by which all values are scaled; None: rows have scales of their own."""

    def __len__(self) -> int:
        return self.count

    def to(self, dtype: torch.dtype) -> FP8Rows:
        """Return rows whose gradient comes in another dtype."""
        if dtype is self.dtype:
            return self
        before, send_back = self.dtype, self.send_back  # backward shall not hold the rows
        return replace(self, dtype=dtype, send_back=lambda gradient: send_back(gradient.to(before)))

    def values(self) -> torch.Tensor:
        """Return the values, [R, H], differentiable."""
        shape, dtype, send_back = (self.count, self.tokens.shape[1]), self.dtype, self.send_back
        return linear_map(
            self.tokens, lambda _: self.matrix.dequantize(*shape).to(dtype), lambda gradient: send_back(gradient)()
        )


Rows = torch.Tensor | FP8Rows
"""Tokens for experts, [R, H]."""


def read_of(rows: Rows) -> torch.Tensor:
    """Return the tensor that autograd sees when rows are read."""
    return rows.tokens if isinstance(rows, FP8Rows) else rows


def values_of(rows: Rows) -> torch.Tensor:
    """Return the values of rows, [R, H], in high precision, differentiable."""
    return rows.values() if isinstance(rows, FP8Rows) else rows


def with_amax(values: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return some values of rows, a tensor just made; a cast to the rows' format and scale gives their bytes again."""
    return deliver_amax(values, rows.amax) if isinstance(rows, FP8Rows) else values


def received_rows(
    tokens: torch.Tensor, rows: torch.Tensor, cast: QuantizedMatrix, amax: torch.Tensor | None, send_back: SendBack
) -> FP8Rows:
    """Return rows as they came.

    Args:
        tokens, amax, send_back: as in `FP8Rows`.
        rows: [R, B], each contiguous, of what `packed` made.
        cast: this rank's cast of its tokens; all ranks' are alike.
    """
    # kernels read no empty matrix: without a row that came, one of no meaning
    matrix = _unpacked(rows if len(rows) else rows.new_empty(1, rows.shape[1]), cast)
    return FP8Rows(tokens, send_back, matrix, len(rows), tokens.dtype, amax)


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

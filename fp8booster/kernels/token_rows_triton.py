"""Sums of tokens' rows on a GPU: one launch each way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8booster.kernels.launch import ceil_div, launch

LARGEST_BLOCK = 4096  # values of a row that a program has in registers at once
WARPS = 4


@triton.jit
def sum_rows_kernel(
    x,  # rows
    places,  # int64 [tokens, OF_TOKEN]
    weights,  # [tokens, OF_TOKEN], where WEIGHTED
    y,  # sums
    features,
    WEIGHTED: tl.constexpr,
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up a block of one token's rows; products are of the rows' dtype where ROUNDED, else FP32."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < features
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(OF_TOKEN):
        choice = token * OF_TOKEN + number
        row = tl.load(places + choice) * features
        values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            values = values * tl.load(weights + choice).to(tl.float32)
            if ROUNDED:  # as torch multiplies 16 bits by 16: the product is rounded before it is added
                values = values.to(x.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(y + token * features + column, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_rows_backward_kernel(
    dy,  # of the sums
    x,
    places,
    weights,
    dx,
    dweights,
    features,
    OF_TOKEN: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program makes the gradient of one row and of its weight."""
    choice = tl.program_id(0).to(tl.int64)
    token, row = choice // OF_TOKEN, tl.load(places + choice)
    weight = tl.load(weights + choice).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    # a whole row for each program: so the weight's gradient is one sum, without atomics
    for first in tl.range(0, features, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < features
        gradient = tl.load(dy + token * features + column, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * features + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * features + column, (gradient * weight).to(dx.dtype.element_ty), mask=inside)
        values = gradient * values
        if ROUNDED:
            values = values.to(x.dtype.element_ty).to(tl.float32)
        total += values
    tl.store(dweights + choice, tl.sum(total, 0).to(dweights.dtype.element_ty))


def _constants(rows: Tensor, places: Tensor, weights: Tensor | None) -> dict[str, object]:
    rounded = weights is not None and torch.promote_types(rows.dtype, weights.dtype) is not torch.float32
    block = min(LARGEST_BLOCK, 1 << (rows.shape[1] - 1).bit_length())
    # a product and a sum in one rounding would be another value
    return {
        "num_warps": WARPS,
        "enable_fp_fusion": False,
        "OF_TOKEN": places.shape[1],
        "ROUNDED": rounded,
        "BLOCK": block,
    }


def sum_rows_triton(rows: Tensor, places: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute `sum_rows`."""
    tokens, features = len(places), rows.shape[1]
    sums = rows.new_empty((tokens, features))
    constants = _constants(rows, places, weights)
    if sums.numel():
        launch(
            sum_rows_kernel,
            (tokens, ceil_div(features, constants["BLOCK"])),
            (rows, places, rows if weights is None else weights, sums),
            (features,),
            WEIGHTED=weights is not None,
            **constants,
        )
    return sums


def sum_rows_backward_triton(gradient: Tensor, rows: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `sum_rows_backward`; weights' gradients are summed in another order."""
    drows, dweights = torch.empty_like(rows), torch.empty_like(weights)
    if rows.numel():
        launch(
            sum_rows_backward_kernel,
            places.numel(),
            (gradient, rows, places, weights, drows, dweights),
            (rows.shape[1],),
            **_constants(rows, places, weights),
        )
    return drows, dweights

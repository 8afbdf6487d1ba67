"""Experts that run one by one, where grouped products (`nn.experts.grouped`) are not right or not faster.

Each sees as many tokens as chose it. FP8 products need multiples of 16, so the cast of its input pads the rows
(`kernels.cast`), and an expert without tokens computes an empty product. Its weight gradient is zero: every rank has a
gradient for every expert that it holds, in the same order, as reductions over ranks need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8booster.nn.experts.fp8_rows import FP8Rows, values_of, with_amax
from fp8booster.nn.experts.routing import Routed, Routes, rows_of, weighted_sum
from fp8booster.nn.linear.functional import linear_map

Expert = Callable[[torch.Tensor], torch.Tensor]


def scale_gradient(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return `x`; what lies before it gets its gradient times `factor`."""
    return x if factor == 1 else linear_map(x, lambda x: x.view_as(x), lambda gradient: gradient * factor)


def run_experts(routed: Routed, experts: Sequence[Expert], factor: float = 1.0) -> torch.Tensor:
    """Compute each expert on its tokens, one by one; the host waits for how many these are.

    Args:
        routed: experts read values of tokens in FP8.
        experts: of this rank; one without tokens is called on none.
        factor: multiplies the gradients of the experts' weights, and not those of the tokens.

    Returns:
        The weighted sum of what each token's experts make of it, [T, H'], of the dtype that they give.
    """
    tokens = routed.tokens
    if isinstance(tokens, FP8Rows) and torch.is_inference_mode_enabled():
        # tensors of that mode carry no amax, without which experts would round the values a second time
        with torch.inference_mode(False), torch.no_grad():
            return run_experts(routed, experts, factor)
    counts = routed.counts(len(experts))
    routes = Routes.of(routed.chosen, len(experts), routed.rows)
    rows = rows_of(values_of(tokens), routes)  # queued before the host waits
    results = []
    for expert, x in zip(experts, rows.split(counts.tolist()[0]), strict=True):
        # times the factor behind the expert and its inverse before it: its weights alone see the factor
        y = expert(with_amax(scale_gradient(x, 1 / factor), tokens))
        results.append(scale_gradient(y, factor))
    return weighted_sum(torch.cat(results), routed.weights, routes)

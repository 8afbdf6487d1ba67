"""Euclidean norms of many tensors, each read once.

`torch._foreach_norm`, whose programs take 65536 values each, is as fast alone, but not while the products of backward
run: benchmarks/results/h200/llama-7b-4-options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator


@operator()
def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the norm of each tensor: float32 [tensors]; squares are added in FP32, in one order each time.

    Args:
        tensors: of one device; BF16, FP16 or FP32, of any shapes; NaN and infinity in one reach its norm.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    return torch.stack(torch._foreach_norm([tensor.detach() for tensor in tensors], dtype=torch.float32))

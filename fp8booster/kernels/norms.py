"""Euclidean norms of many tensors, each read once.

`torch._foreach_norm`, whose programs take 65536 values each, is as fast alone, but not beside the products of backward:
benchmarks/results/h200/llama-7b-4-options.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster.kernels.device import runs_triton


def norms_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each tensor: float32 [], on its device; squares are added in FP32, in the same order each time.

    Args:
        tensors: BF16, FP16 or FP32, of any shapes; NaN and infinity in one reach its norm.
    """
    if not tensors:
        return []
    together = len({tensor.device for tensor in tensors}) == 1
    if together and all(runs_triton(tensor) and tensor.is_contiguous() for tensor in tensors):
        from fp8booster.kernels.norms_triton import norms_triton  # Triton is needed only here

        return norms_triton(tensors)
    return list(norms_reference(tensors))


def norms_reference(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """What `norms_of` computes, in torch."""
    return torch._foreach_norm([tensor.detach() for tensor in tensors], dtype=torch.float32)

"""Gradients that are sums over a group of ranks, where backward passes accumulate on them.

Sequence parallelism gives each rank of the tensor parallel group a part of the gradients of normalization weights, and
a weight that two pipeline stages share gets a part on each: the parts are added over ranks. Colossal-AI adds what has
accumulated, after each backward without `no_sync`: earlier micro-batches, which are sums already, are added again
(hybrid_parallel_plugin.py:156,242,793). A mean would not change by that, a sum does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from fp8booster import comm

Gradients = Mapping[torch.Tensor, torch.Tensor | None]
"""The gradient of each parameter, or None where it has none."""


class SummedGradients:
    """Sums gradients over a group, each micro-batch's once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._summed: set[torch.Tensor] = set()

    def sum(self, gradients: Gradients) -> None:
        """Add gradients over the ranks, in place; all hold the same bits then."""
        found = {parameter: gradient for parameter, gradient in gradients.items() if gradient is not None}
        comm.all_reduce_coalesced(list(found.values()), dist.ReduceOp.SUM, self._group)
        self.mark(found)

    def mark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that the gradients of parameters were added over the ranks."""
        self._summed.update(parameters)

    def spread(self, gradients: Gradients) -> None:
        """Before a backward adds to gradients: divide those that are sums, so that the next sum gives them back."""
        spread = [gradient for parameter, gradient in gradients.items() if parameter in self._summed]
        spread = [gradient for gradient in spread if gradient is not None]  # None: it was set to zero since
        if spread:
            torch._foreach_mul_(spread, 1.0 / dist.get_world_size(self._group))
        self._summed.clear()

"""Gradients that are sums over a group of ranks, where backward passes accumulate on them.

Sequence parallelism gives each rank of the tensor parallel group a part of the gradients of normalization weights, and
a weight that two pipeline stages share gets a part on each: the parts are added over ranks. Colossal-AI adds what has
accumulated, after each backward without `no_sync`: earlier micro-batches, which are sums already, are added again
(hybrid_parallel_plugin.py:156,242,793). A mean would not change by that, a sum does.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

from fp8booster import comm

GradientOf = Callable[[nn.Parameter], torch.Tensor | None]


class SummedGradients:
    """Sums the gradients of some parameters over a group, each micro-batch's once.

    Args:
        group: the ranks, each with a part of every gradient.
        parameters: whose gradients are sums.
        gradient_of: returns the gradient of a parameter, or None where it has none.
        encoding: of the messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        parameters: list[nn.Parameter],
        gradient_of: GradientOf = attrgetter("grad"),
        encoding: comm.Encoding = comm.encoding.DEFAULT,
    ) -> None:
        self._group, self._parameters, self._gradient_of, self._encoding = group, parameters, gradient_of, encoding
        self.are_summed = False
        """No backward has added to the gradients since they were added over the ranks."""

    def sum(self) -> list[torch.Tensor]:
        """Add the gradients over the ranks, in place, and return them; all ranks hold the same bits then."""
        gradients = self._gradients()
        comm.all_reduce_coalesced(gradients, dist.ReduceOp.SUM, self._group, encoding=self._encoding)
        self.are_summed = True
        return gradients

    def spread(self) -> None:
        """Before a backward adds to gradients: divide those that are sums, so that the next sum gives them back."""
        # an equal part on each rank: the next sum over the ranks gives these back, and adds the new parts
        gradients = self._gradients() if self.are_summed else []
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / dist.get_world_size(self._group))
        self.are_summed = False

    def _gradients(self) -> list[torch.Tensor]:
        found = (self._gradient_of(parameter) for parameter in self._parameters)
        return [gradient for gradient in found if gradient is not None]

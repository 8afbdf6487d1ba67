"""Experts that are spread over the ranks of a group, whatever block they belong to.

    tokens [T, H] -- sorted by expert --> exchange --> this rank's experts --> exchange --> weighted sum [T, H]

A block's router gives the experts of each token, counted over all ranks, and their weights. What computes this rank's
experts is told which rows are whose (`Run`), and need not know of other ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fp8booster.comm.encoding import Encoding
from fp8booster.nn.experts.dispatch import exchange_rows
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.routing import Routes, count_rows, spread, weighted_sum

EXCHANGED = "experts spread over ranks exchange rows whose number the host waits for"
"""Why no CUDA graph holds them."""

Run = Callable[[torch.Tensor, HostCopy, float, float], torch.Tensor]
"""Computes the experts of this rank, each on its rows.

Args:
    rows: [R, H], by sender, and of each sender by expert.
    counts: int64 [senders, experts of this rank], rows from each sender for each expert.
    factor: multiplies the gradients of the experts' parameters, and not those of the rows.
    usual_rows: the mean of R over all ranks that hold these experts, by which they choose alike how to compute.

Returns:
    [R, H], in the order of `rows`.
"""


class _Loads(NamedTuple):
    """Rows for the experts, on their way to the host."""

    by_receiver: HostCopy
    """Those from this rank, [ranks, experts of each]."""

    by_sender: HostCopy
    """Those for the experts of this one, [ranks, experts of this one]."""

    of_copies: HostCopy | None
    """Those of all ranks that hold these experts, [1]; None: there are no others."""


class Spread:
    """The ranks that hold a block's experts, each as many.

    The gradient of an expert's parameters, averaged over the ranks that hold it, is that of the mean of all ranks'
    losses: an expert without tokens on some of them adds zeros there.

    Args:
        experts: of all ranks together; this rank holds those from `first` on.
        group: over which they are spread.
        copies: the ranks that hold the same experts as this one; None: this one alone does.
        encoding: of tokens and their gradients; None sends them as they are.

    Raises:
        ValueError: the experts cannot be divided evenly.
    """

    def __init__(
        self,
        experts: int,
        group: dist.ProcessGroup,
        copies: dist.ProcessGroup | None = None,
        encoding: Encoding | None = None,
    ) -> None:
        self.experts, self.group, self.copies, self.encoding = experts, group, copies, encoding
        self.ranks = dist.get_world_size(group)
        self.holders = 1 if copies is None else dist.get_world_size(copies)
        if experts % self.ranks:
            raise ValueError(
                f"{experts} experts cannot be divided evenly among {self.ranks} ranks; use an ep_size that divides "
                "their number"
            )
        self.held = experts // self.ranks
        self.first = dist.get_rank(group) * self.held

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # a copy of a block has the same ranks, and groups cannot be copied

    def own(self, of_all: Any) -> Any:
        """Return the part of this rank's experts of what has one item for each expert, as a list or a tensor."""
        return of_all[self.first : self.first + self.held]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Return all experts' part, [experts, ...], of this rank's one, [held, ...]; all ranks must call it."""
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own.contiguous(), self.group)
        return torch.cat(parts)

    def mix(
        self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, prepare: Callable[[], Run]
    ) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            tokens: [T, H].
            chosen: integers [T, k], experts of each token, counted over all ranks.
            weights: [T, k].
            prepare: looks at the experts of this rank, while their rows are counted, and gives what computes them.

        Returns:
            [T, H] of the tokens' dtype.
        """
        loads = self._loads(chosen)
        # the host waits for the loads alone: this is queued behind them, and keeps the GPU busy when the host goes on
        routes = Routes.of(chosen, self.experts)
        rows = spread(tokens, routes)
        # what takes the host alone comes before it waits, as GPUs and other ranks are busy until then
        made = self._at_experts(rows, loads, prepare())
        return weighted_sum(made, weights, routes).to(tokens.dtype)

    def _loads(self, chosen: torch.Tensor) -> _Loads:
        """Begin to tell the ranks how many rows go from each of them to each expert."""
        numbers = torch.empty(2, self.experts, dtype=torch.int64, device=chosen.device)
        counts, arriving = numbers
        count_rows(chosen, self.experts, out=counts)
        # counts go ahead of the tokens: a rank must know how many rows it receives before it makes room
        if self.ranks > 1:
            dist.all_to_all_single(arriving, counts, group=self.group)
        else:
            arriving.copy_(counts)
        told = numbers.view(-1)
        if self.holders > 1:
            rows = arriving.sum().view(1)
            dist.all_reduce(rows, group=self.copies)
            told = torch.cat([told, rows])
        copy = HostCopy(told)
        by_receiver, by_sender = (copy.part(first, self.ranks, self.held) for first in (0, self.experts))
        return _Loads(by_receiver, by_sender, copy.part(2 * self.experts, 1) if self.holders > 1 else None)

    def _at_experts(self, rows: torch.Tensor, loads: _Loads, run: Run) -> torch.Tensor:
        """Send rows [T k, H], sorted by expert, to their experts, and what these make of them back."""
        sent = received = [len(rows)]
        if self.ranks > 1:
            # every rank waits for its GPU here, as all-to-all with uneven splits needs the sizes of its messages
            sent, received = ([sum(rank) for rank in each.tolist()] for each in (loads.by_receiver, loads.by_sender))
        of_all = sum(received) if loads.of_copies is None else loads.of_copies.tolist()[0]
        rows = exchange_rows(rows, sent, received, self.group, self.encoding)
        # tokens of all these ranks add up here, and the gradient is to be a mean over ranks
        made = run(rows, loads.by_sender, 1 / self.ranks, of_all / self.holders)
        return exchange_rows(made, received, sent, self.group, self.encoding)

"""Cross entropy where a head's rows are padded, or spread over ranks: each rank has the logits of its own tokens.

With the logits of a row spread over ranks r

    L_r = log(sum(exp(logits of r)))           L = log(sum(exp(L_r) over r))
    loss = L - logits[target]
    gradient of r = softmax(logits of r) * exp(L_r - L) - onehot(target), where r has the target

Each rank makes L_r and its own softmax by `kernels.cross_entropy`. One gather of two FP32 values a row from each rank
makes L and the target's logit; then the softmax is multiplied in place. The value at a row's target is made of FP32
values and is rounded once, the others are rounded twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fp8booster.comm.collectives import gather_bytes
from fp8booster.kernels.cross_entropy import cross_entropy

_NO_COLUMN = -1
"""For the kernel: a target that does not count, and that no column can be."""


@dataclass(frozen=True)
class VocabularyPart:
    """Which tokens the rows of a head stand for."""

    tokens: int
    """In the whole vocabulary."""

    columns: int
    """Of this rank's logits, the first so many are tokens; the others are padding, which counts for nothing."""

    first: int = 0
    """The token of the first column."""

    group: dist.ProcessGroup | None = None
    """The ranks over which the vocabulary is spread; None where this rank has all of it."""

    def cross_entropy(
        self,
        logits: torch.Tensor,
        targets: torch.Tensor,
        *,
        ignore_index: int,
        factor: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `kernels.cross_entropy.cross_entropy`, of whole rows.

        Args:
            logits: [R, this rank's columns and padding]; with a factor their gradient takes their place.
            targets: int64 [R], tokens of the whole vocabulary, the same on all ranks of the group.
            ignore_index: the target of rows that do not count.
            factor: float32, one value.

        Returns:
            (losses, float32 [R], the same on all ranks; the gradient's amax, or None where it was not found).
        """
        own = logits[:, : self.columns]
        if factor is not None:
            logits[:, self.columns :].zero_()
        if self.group is None:
            return cross_entropy(own, targets, ignore_index=ignore_index, factor=factor)
        return self._spread(own, targets, targets != ignore_index, factor), None

    def _spread(
        self, logits: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor, factor: torch.Tensor | None
    ) -> torch.Tensor:
        place = targets - self.first
        here = (place >= 0) & (place < self.columns)
        column = torch.where(here, place, 0)
        if self.columns:
            at_column = logits.gather(1, column[:, None])[:, 0].float()
            losses, _ = cross_entropy(
                logits, torch.where(kept, column, _NO_COLUMN), ignore_index=_NO_COLUMN, factor=factor
            )
            own = losses + at_column
        else:
            at_column = torch.zeros(len(targets), dtype=torch.float32, device=logits.device)
            own = torch.full_like(at_column, -torch.inf)
        ranks = dist.get_world_size(self.group)
        values = torch.stack((own, torch.where(here, at_column, 0.0)))
        gathered = values.new_empty((ranks, *values.shape))
        gather_bytes(gathered.view(-1), values.view(-1), self.group)
        whole, at_target = gathered[:, 0].logsumexp(0), gathered[:, 1].sum(0)
        known = (targets >= 0) & (targets < self.tokens)
        # a row whose target is no token is NaN, as the kernel has it
        right = torch.where(kept, torch.where(known, 1.0, torch.nan), 0.0)
        if factor is not None and self.columns:
            share = torch.where(kept, (own - whole).exp() * right, 0.0)
            logits.mul_(share[:, None])
            value = ((at_column - whole).exp() - here.float()) * factor * right
            logits.scatter_(1, column[:, None], torch.where(kept, value, 0.0)[:, None].to(logits.dtype))
        return torch.where(kept, (whole - at_target) * right, 0.0)

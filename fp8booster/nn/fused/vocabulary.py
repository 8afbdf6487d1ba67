"""Cross entropy where a head's rows are padded, or spread over ranks: each rank has the logits of its own tokens.

With the logits of a row spread over ranks r

    L_r = log(sum(exp(logits of r)))           L = log(sum(exp(L_r) over r))
    loss = L - logits[target]
    gradient of r = exp(logits of r - L) - onehot(target), where r has the target

Each rank makes L_r by `kernels.cross_entropy.logsumexp`, which reads its logits once. One gather of two FP32 values a
row from each rank makes L and the target's logit; then the gradient is written over the logits, which are read once
more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster.comm.observer import observer
from fp8booster.comm.transport import gather_bytes
from fp8booster.kernels.cross_entropy import cross_entropy, logsumexp, write_gradient

NAME = "loss over a spread vocabulary"
"""The row of `comm.statistics()`."""

UNCOMPRESSED_REASON = "FP32, two for each token"
"""A loss that FP8 rounded could not be followed, and the gradient takes from it how sure the model is."""

_IGNORED, _ELSEWHERE = -1, -2
"""For the kernels: the target of rows that do not count, and of those whose target other ranks have."""


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens that the rows of a head stand for."""

    tokens: int  # in the whole vocabulary
    columns: int  # the first so many of this rank's logits are tokens; the others are padding, which counts for nothing
    first: int = 0  # the token of the first column
    group: dist.ProcessGroup | None = None  # over which the vocabulary is spread; None: this rank has all of it

    def cross_entropy(
        self,
        logits: Tensor,
        targets: Tensor,
        *,
        ignore_index: int,
        factor: Tensor | None = None,
        scale: float = 1.0,
        cap: float | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute `kernels.cross_entropy.cross_entropy` of whole rows.

        Args:
            logits: [R, this rank's columns and padding]; with a factor their gradient takes their place.
            targets: int64 [R], tokens of the whole vocabulary, the same on all ranks of the group.
            ignore_index: the target of rows that do not count.
            factor: float32, one value.
            scale, cap: as there, where no other ranks hold a part.

        Returns:
            (losses, float32 [R], the same on all ranks; the gradient's amax, or None where it was not found).
        """
        own = logits[:, : self.columns]
        if factor is not None:
            logits[:, self.columns :].zero_()
        if self.group is None:
            return cross_entropy(own, targets, ignore_index=ignore_index, factor=factor, scale=scale, cap=cap)
        if scale != 1.0 or cap is not None:
            raise ValueError(
                "logits that are spread over ranks are neither scaled nor capped here; compute them, and their loss, "
                "as Colossal-AI does (fused=False)"
            )
        return self._spread(own, targets, targets != ignore_index, factor)

    def _spread(
        self, logits: Tensor, targets: Tensor, kept: Tensor, factor: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        place = targets - self.first
        here = (place >= 0) & (place < self.columns)
        if self.columns:
            column = torch.where(here, place, 0)
            at_column = logits.gather(1, column[:, None])[:, 0].float()
            own = logsumexp(logits, torch.where(kept, column, _IGNORED), ignore_index=_IGNORED)
        else:
            at_column = torch.zeros(len(targets), dtype=torch.float32, device=logits.device)
            own = torch.full_like(at_column, -torch.inf)
        values, ranks = torch.stack((own, torch.where(here, at_column, 0.0))), dist.get_world_size(self.group)
        gathered = values.new_empty((ranks, *values.shape))
        observer.count_plain(NAME, ranks, values.nbytes, UNCOMPRESSED_REASON, "all_gather_into_tensor")
        gather_bytes(gathered.view(-1), values.view(-1), self.group)
        # FP32 and in the ranks' order on all of them, so that each has the same loss, bit for bit
        known = (targets >= 0) & (targets < self.tokens)
        # a row whose target is no token is NaN, as the kernel has it
        whole = torch.where(known, gathered[:, 0].logsumexp(0), torch.nan)
        losses = torch.where(kept, whole - gathered[:, 1].sum(0), 0.0)
        if factor is None or not self.columns:
            return losses, None
        columns = torch.where(kept, torch.where(here, place, _ELSEWHERE), _IGNORED)
        return losses, write_gradient(logits, columns, whole, ignore_index=_IGNORED, factor=factor)

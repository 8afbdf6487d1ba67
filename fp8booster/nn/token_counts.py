"""The token counts that a layer has met."""

from __future__ import annotations

MOST = 1024
"""Counts that a layer remembers. Experts meet another one in nearly every step, a whole training run millions."""


class TokenCounts(dict[int, bool]):
    """For each token count, whether the products ran in FP8; of the first `MOST` that are met."""

    def __setitem__(self, rows: int, in_fp8: bool) -> None:
        if len(self) < MOST or rows in self:
            super().__setitem__(rows, in_fp8)

    @property
    def note(self) -> str:
        """What a list of them leaves out, for its end."""
        return f", of the first {MOST} token counts" if len(self) == MOST else ""

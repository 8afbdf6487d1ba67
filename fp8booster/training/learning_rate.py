"""The learning rate: linear warm-up, then a cosine. A function of the step alone, so a resumed run needs no state."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """Rises to `peak` over `warmup` steps, falls along a cosine to `floor` at step `decay`, and stays there."""

    peak: float
    floor: float
    warmup: int
    decay: int

    @classmethod
    def over(cls, steps: int, peak: float) -> WarmupCosine:
        """Warm-up over a tenth of the steps, and a tenth of the peak at the last."""
        return cls(peak=peak, floor=peak / 10, warmup=max(1, steps // 10), decay=steps)

    def rate(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if step >= self.decay:
            return self.floor
        progress = (step - self.warmup) / (self.decay - self.warmup)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))

"""Optimizers by name, and their learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fp8booster.optim import AdamW

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "adamw-8bit": AdamW}
"""torch's AdamW, and `fp8booster.optim.AdamW`, whose moments take one byte each."""


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], **rates: Any) -> Optimizer:
    """Return an optimizer of `OPTIMIZERS` over parameters, with the arguments of torch's AdamW."""
    if name == "adamw":
        rates["fused"] = True
    # One group: Colossal-AI's ZeRO sends its bucket of gradients whenever the group changes, so a second one for norms
    # would cut every bucket at every norm.
    return OPTIMIZERS[name](parameters, **rates)


@dataclass(frozen=True, kw_only=True)
class WarmupCosine:
    """A learning rate that rises to `peak` over `warmup` steps and falls along a cosine to `floor` at step `decay`.

    It is a function of the step alone, so a resumed run needs no state.
    """

    peak: float
    floor: float
    warmup: int
    decay: int

    @classmethod
    def over(cls, steps: int, peak: float) -> WarmupCosine:
        """Return one with warm-up over a tenth of the steps, and a tenth of the peak at the last."""
        return cls(peak=peak, floor=peak / 10, warmup=max(1, steps // 10), decay=steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.peak * step / self.warmup
        if step >= self.decay:
            return self.floor
        progress = (step - self.warmup) / (self.decay - self.warmup)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))

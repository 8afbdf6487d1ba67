"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fp8booster.optim import AdamW

OPTIMIZERS: dict[str, type[Optimizer]] = {"adamw": torch.optim.AdamW, "adamw-8bit": AdamW}
"""torch's AdamW, and `fp8booster.optim.AdamW`, whose moments take one byte each."""


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], **rates: Any) -> Optimizer:
    """An optimizer of `OPTIMIZERS` over one group of parameters, with the arguments of torch's AdamW.

    One group: Colossal-AI's ZeRO sends its bucket of gradients whenever the group changes, so a second one for norms
    would cut every bucket at every norm.
    """
    if name == "adamw":
        rates["fused"] = True
    return OPTIMIZERS[name](parameters, **rates)

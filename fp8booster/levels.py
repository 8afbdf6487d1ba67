"""Levels by name: how much of training is sent and kept in FP8 and in 8 bits, from little to all that is lean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from fp8booster.config import Activations, FP8Config, WeightCopies
from fp8booster.optim import AdamW


@dataclass(frozen=True)
class Level:
    """The configuration of a model's layers and plugin, and the optimizer that goes with it."""

    config: FP8Config
    optimizer: type[Optimizer]
    """AdamW, with the arguments of torch's."""


_O3 = {"weight_copies": WeightCopies(high_precision=False, transposes=False)}
_KINDS: dict[str, tuple[dict[str, Any], type[Optimizer]]] = {
    "O1": ({}, torch.optim.AdamW),
    "O2": ({}, AdamW),
    "O3": (_O3, AdamW),
    "lean": ({**_O3, "activations": Activations(saved="8-bit"), "gradient_accumulation": "8-bit"}, AdamW),
}
LEVELS = tuple(_KINDS)
"""Each adds to those before it: gradients and messages in FP8, moments in 8 bits, weights in FP8 alone, saved
activations and gradients between micro-batches in 8 bits. The first three are those of FP8-LM (arXiv 2310.18313)."""


def level(name: str, **fields: Any) -> Level:
    """A level of `LEVELS`; docs/configuration.md has its formats and bytes.

    Args:
        name: of the level.
        fields: of `FP8Config`, in the place of the level's and of the defaults.

    Raises:
        ValueError: there is no such level, or a field has a value that is not allowed with the others.
        TypeError: a field that does not exist, or of the wrong type.
    """
    if name not in LEVELS:
        raise ValueError(f"there is no level {name!r}; use {', '.join(LEVELS[:-1])} or {LEVELS[-1]}")
    own, optimizer = _KINDS[name]
    return Level(FP8Config(**{**own, **fields}), optimizer)

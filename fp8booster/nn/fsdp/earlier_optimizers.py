"""Optimizers that were made before FSDP2 sharded their model, and train parameters that it no longer has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fp8booster.optim.one_pass import COUNTS_STEPS

_replaced = WeakIdKeyDictionary()  # those that somebody still holds


def note_replaced(parameters: Iterable[nn.Parameter]) -> None:
    """Remember parameters in whose place a model has shards now."""
    for each in parameters:
        _replaced[each] = None


def _refuse(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError before a step of an optimizer that has such parameters: they get no gradients."""
    if len(_replaced) and any(each in _replaced for group in optimizer.param_groups for each in group["params"]):
        raise ValueError(
            "the optimizer was made before fully_shard, and its parameters are no longer the model's; make the "
            "optimizer after it"
        )


setattr(_refuse, COUNTS_STEPS, True)  # it asks whose the parameters are, and looks at none of their values
register_optimizer_step_pre_hook(_refuse)

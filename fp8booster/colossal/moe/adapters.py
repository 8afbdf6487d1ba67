"""Adapters of peft that cannot be divided with the experts that they are on."""

from __future__ import annotations

from typing import Any, cast

from torch import nn

from fp8booster.nn.adapters import is_adapted
from fp8booster.nn.experts.fp8_experts import are_experts


def refuse_adapters_of_all(model: nn.Module) -> None:
    """Raise ValueError where peft adapts experts in one parameter: its matrices are those of all experts together."""
    for module in model.modules():
        if is_adapted(module) and are_experts(cast(Any, module).get_base_layer()):
            raise ValueError(
                "adapters of experts in one parameter (peft's target_parameters) hold those of all experts, which "
                "sharding divides; use ep_size=1, tp_size=1 and pp_size=1, or adapt other layers, as attention's"
            )

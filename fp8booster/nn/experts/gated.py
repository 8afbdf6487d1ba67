"""Gated feed-forward experts: which classes compute `down(act_fn(gate(x)) * up(x))`, and what they call the three."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import cached_by_class, may_be_bypassed, must_be_called

_HUB = "transformers_modules"
"""Package of the models whose code comes from the hub, in folders of their own."""

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_GATED = {
    ("transformers.models.mixtral.modeling_mixtral", "MixtralBlockSparseTop2MLP"): ("w1", "w3", "w2"),
    ("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3MLP"): _GATE_UP_DOWN,
    (f"{_HUB}.modeling_deepseek", "DeepseekMLP"): _GATE_UP_DOWN,
    (f"{_HUB}.modeling_deepseek", "DeepseekV3MLP"): _GATE_UP_DOWN,
}
"""By module and name of the class: the names of gate, up and down."""


@cached_by_class
def _names(cls: type[nn.Module]) -> tuple[str, ...]:
    """What a class of experts calls its gate, up and down; empty: it is not known to compute no more than these."""
    # classes of this package come before the one that they mix into
    written = next(each for each in cls.__mro__ if not each.__module__.startswith("fp8booster."))
    folder, _, file = written.__module__.rpartition(".")
    if folder.startswith(_HUB):
        folder = _HUB
    return _GATED.get((f"{folder}.{file}", written.__name__), ())


def gate_up_down(expert: nn.Module) -> list[FP8Layer]:
    """The three layers of an expert of a known class."""
    modules: Mapping[str, Any] = expert._modules
    return [modules[name] for name in _names(type(expert))]


def why_not_gated(expert: nn.Module) -> str | None:
    """Why a module is not known to compute `down(silu(gate(x)) * up(x))` and nothing else, or None where it is."""
    if not _names(type(expert)):
        return f"{type(expert).__name__} has no grouped form"
    # past nn.Module's search, which is slow for what is not there
    if getattr(vars(expert).get("config"), "pretraining_tp", 1) > 1:
        return "pretraining_tp is more than 1"  # DeepSeek's own code cuts the weights then
    activation = expert._modules.get("act_fn")
    if not isinstance(activation, nn.SiLU):
        return f"the activation is {type(expert.act_fn).__name__}"
    if must_be_called(expert):
        return "an expert has hooks or a forward of its own, which must run"
    if not may_be_bypassed(activation):
        return "an expert's activation has hooks or a forward of its own, which must run"
    return None

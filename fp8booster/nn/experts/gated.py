"""Gated feed-forward experts: which classes compute `down(act_fn(gate(x)) * up(x))`, and what they call the three.

A class is tried out (`nn.fused.trials`), whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from fp8booster.nn.fused.activations import activation_kind
from fp8booster.nn.fused.families import EXPERT, MLP, PARTS, Part
from fp8booster.nn.fused.trials import is_gated
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import cached_by_class, may_be_bypassed, must_be_called

_PARTS = [part for part in PARTS if part.name in (MLP, EXPERT) and len(part.merged) == 2]
"""What experts call gate and up, and down."""


@cached_by_class
def _known(cls: type[nn.Module]) -> tuple[type[nn.Module], Part] | None:
    """Return the class that a class of experts was written as, and what it calls its layers; None: it is none."""
    # classes of this package come before the one that they mix into
    written = next(each for each in cls.__mro__ if not each.__module__.startswith("fp8booster."))
    return next(((written, part) for part in _PARTS if is_gated(written, part, _ACTIVATION, _READ_BY_SOME)), None)


def gate_up_down(expert: nn.Module) -> list[FP8Layer]:
    """Return the three layers of an expert of a known class."""
    known, modules = _known(type(expert)), cast(Mapping[str, Any], expert._modules)
    return [] if known is None else [modules[name] for name in (*known[1].merged, known[1].output)]


def readers_in_fp8(expert: nn.Module) -> list[FP8Layer]:
    """Return gate and up, by which alone an expert of a known class reads tokens; none: it may read high precision."""
    readers = gate_up_down(expert)[:-1]
    return readers if all(isinstance(layer, FP8Layer) for layer in readers) else []


_ACTIVATION = "act_fn"


_READ_BY_SOME = ("pretraining_tp",)
"""Fields of the configuration that DeepSeek's own code reads, which cuts the weights where they are more than 1."""


def why_not_gated(expert: nn.Module) -> str | None:
    """Return why a module is not known to compute `down(silu(gate(x)) * up(x))` and nothing else; None: it is."""
    known = _known(type(expert))
    if known is None or not is_gated(*known, _ACTIVATION, _READ_BY_SOME):
        return f"{type(expert).__name__} has no grouped form"
    # past nn.Module's search, which is slow for what is not there
    if getattr(vars(expert).get("config"), "pretraining_tp", 1) > 1:
        return "pretraining_tp is more than 1"
    activation = expert._modules.get(_ACTIVATION)
    if activation is None or activation_kind(activation) != "silu":
        return f"the activation is {type(expert.act_fn).__name__}"
    if must_be_called(expert):
        return "an expert has hooks or a forward of its own, which must run"
    if not may_be_bypassed(activation):
        return "an expert's activation has hooks or a forward of its own, which must run"
    return None

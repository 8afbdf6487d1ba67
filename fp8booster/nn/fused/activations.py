"""Names of what torch's and transformers' activations compute, by exact class: they have state, so no trial tells."""

from __future__ import annotations

import functools
import math
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn

from fp8booster.nn.modules import cached_by_class, may_be_bypassed


def activation_name(block: nn.Module) -> str | None:
    """Return what a feed-forward block calls its activation; None: it has none under a name that is known."""
    return next((name for name in ("act_fn", "activation_fn", "act") if name in block._modules), None)


def activation_kind(activation: Any) -> str | None:
    """Return what an activation computes now, as `pointwise.activate` calls it; None: another one, or one not known.

    It is asked at each call, for modules are replaced, and their attributes change.

    Args:
        activation: a module, or a function.
    """
    rule = _rule_of(type(activation))
    return None if rule is None or type(activation).forward is not rule.forward else rule.kind(activation)


def fused_kind(activation: Any) -> str | None:
    """Return what may be computed in the place of an activation, as `activation_kind`; None: it must be called."""
    if isinstance(activation, nn.Module) and not may_be_bypassed(activation):
        return None
    return activation_kind(activation)


class _Rule(NamedTuple):
    """Tells what a module of a class computes."""

    forward: Callable  # that the class was written with: someone may replace it
    kind: Callable[[Any], str | None]  # of a module, from its attributes


@cached_by_class
def _rule_of(cls: type[nn.Module]) -> _Rule | None:
    """Return the rule of a class that is listed; None for all others: those derived from one may compute anything."""
    kind = _RULES.get((cls.__module__, cls.__qualname__))
    if kind is None or getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
        return None
    forward = vars(cls).get("forward")
    written = (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None))
    return _Rule(forward, kind) if written == (cls.__module__, f"{cls.__qualname__}.forward") else None


def _of_function(activation: Any) -> str | None:
    """Tell the kind of a module that has a function of torch, or a method of its own, for its attribute `act`."""
    function: Any = vars(activation).get("act")
    options: dict[str, Any] = {}
    if isinstance(function, types.MethodType):
        own = vars(type(activation)).get(function.__name__)
        return _METHODS.get(function.__name__) if function.__func__ is own else None
    if isinstance(function, functools.partial) and not function.args:
        options, function = function.keywords, function.func
    if function is not F.gelu or not options.keys() <= {"approximate"}:
        return None
    return _GELUS.get(options.get("approximate", "none"))


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_METHODS = {"_gelu_python": "gelu", "_gelu_tanh_python": "gelu_tanh"}
_OF_TRANSFORMERS = "transformers.activations"
_RULES: dict[tuple[str, str], Callable[[Any], str | None]] = {
    (nn.SiLU.__module__, "SiLU"): lambda _: "silu",
    (nn.GELU.__module__, "GELU"): lambda activation: _GELUS.get(activation.approximate),
    (_OF_TRANSFORMERS, "SiLUActivation"): lambda _: "silu",
    (_OF_TRANSFORMERS, "GELUActivation"): _of_function,
    (_OF_TRANSFORMERS, "GELUTanh"): _of_function,
    (_OF_TRANSFORMERS, "PytorchGELUTanh"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "NewGELUActivation"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "FastGELUActivation"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "AccurateGELUActivation"): lambda activation: (
        "gelu_tanh" if activation.precomputed_constant == math.sqrt(2 / math.pi) else None
    ),
}
"""By module and name of a class: all that its modules' attributes can change. None of them has parameters."""

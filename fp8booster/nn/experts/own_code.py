"""Tells whether experts run the code that transformers 5 gave their class, so that their attributes tell all.

transformers' decorator gives a class its forward, which calls the implementation that the configuration names. A
program may put another function in the place of the forward, or of the implementation. What that computes is unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8booster.nn.modules import cached_by_class, unmixed

OWN_FORWARD = "a forward of its class's own, which must run"
OWN_IMPLEMENTATION = "an experts_implementation that transformers does not have, which must run"

_DECORATED_IN = "transformers.integrations.moe"
"""The module whose decorator gives classes of experts their forward."""


def why_own_code(module: nn.Module) -> str | None:
    """Return why the code of a module with experts must run, which may compute anything; None: it need not."""
    cls: type[Any] = unmixed(type(module))
    if _has_own_forward(cls, _written_forward(cls)):
        return OWN_FORWARD
    name = getattr(vars(module).get("config"), "_experts_implementation", None)
    transformers = sys.modules.get(_DECORATED_IN)
    if name is None or transformers is None:
        return None
    # looked up at each call: a program may register another under the same name
    function = transformers.ALL_EXPERTS_FUNCTIONS.get(name)
    known = function is None or str(getattr(function, "__module__", "")).startswith("transformers.")
    return None if known else OWN_IMPLEMENTATION


def _written(cls: type[nn.Module]) -> list[type]:
    """Return a class of modules and its bases without those of this package, which are mixed in."""
    return [each for each in cls.__mro__ if not each.__module__.startswith("fp8booster.")]


def _written_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    return next(vars(each)["forward"] for each in _written(cls) if "forward" in vars(each))


@cached_by_class
def _has_own_forward(cls: type[nn.Module], forward: Callable[..., Any]) -> bool:
    """Tell whether a class has another forward than transformers gave it, or its base, with `_apply_gate`."""
    if not hasattr(cls, "_apply_gate"):
        return False
    written = _written(cls)
    owner, gate = (next(n for n, each in enumerate(written) if name in vars(each)) for name in _GIVEN)
    if owner < gate:
        return True
    # a function that was put in the place of the class's own has another name, or calls it from somewhere else
    home = written[owner]
    is_named_so = getattr(forward, "__qualname__", "") == f"{home.__qualname__}.forward"
    begins_in = getattr(forward, "__globals__", {}).get("__name__")
    return not (is_named_so and begins_in in (home.__module__, _DECORATED_IN))


_GIVEN = ("forward", "_apply_gate")

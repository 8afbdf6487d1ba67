"""Finds what a forward can read of modules besides parameters and buffers: attributes, and what these hold in turn.

A graph has all of it for good: numbers, modes, names, functions, and where tensors lie.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.graphs.call_state import is_generator
from fp8booster.nn.graphs.values import CONSTANTS, is_plain
from fp8booster.nn.weights.casting import Casts

MOST_HELD = 256
"""Items of a container or an object that is looked into: longer ones, as labels of a classifier, are no settings."""

MOST_DEEP = 4
"""How far a look goes from an attribute into containers and objects."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: what they hold is looked at by itself."""

_BOOKKEEPING = {
    *("fp8_graphs", "in_fp8", "unfused_calls"),
    *("weight_read_in_training", "weight_read_in_evaluation", "ran_in_evaluation"),
}
"""Attributes of a module by which classes of this package note how it is used, of which no forward is made."""

_OF_OURS = "config", "fp8_weight", "fp8_casts"
"""Attributes of `Casts` and `MergedLayers` that a forward follows from, and that may be changed in place."""

_OPAQUE_PACKAGES = (sys.stdlib_module_names | {"torch", "fp8booster"}) - {"argparse", "types"}
"""Objects of these are told apart, and not looked into: they hold processes, streams, loggers and bookkeeping."""


class Reached:
    """All that modules hold in attributes, directly or in containers and objects, as configurations are.

    Args:
        modules: of a layer.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.holders: list[Any] = []
        """Dictionaries, lists and sets that may change in place."""

        self.views: list[Iterable[Any]] = []
        """Views of what those hold, which show what they hold later."""

        self.tensors: list[Tensor] = []
        self.settings: list[tuple[str, Any]] = []
        """Names and values of what is no tensor: equal where a forward finds the same."""

        self.generators: list[Any] = []
        """What draws random numbers, which changes unseen."""

        self._seen: dict[int, Any] = {}
        for module in modules:
            held = vars(module)
            self.holders.append(held)
            self.views.append(held.values())
            for name, value in held.items():
                if name not in _BOOKKEEPING and (name not in _OF_MODULES or isinstance(value, CONSTANTS)):
                    self._note(name, value, MOST_DEEP)

    def _note(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, CONSTANTS):
            self.settings.append((name, (type(value), value)))
            return
        if isinstance(value, Tensor):
            if is_plain(value):
                self.tensors.append(value)
            self.settings.append((name, id(value)))
            return
        if isinstance(value, (Casts, MergedLayers)):
            self.settings.append((name, id(value)))
            self.views.append(vars(value).values())
            for each in filter(vars(value).__contains__, _OF_OURS):
                self._note(f"{name}.{each}", vars(value)[each], depth)
            return
        if is_generator(value):
            self.generators.append(value)
        inside = _inside(value) if depth else None
        if inside is None or len(inside) > MOST_HELD:
            # of a method another object is made each time
            self.settings.append((name, value if type(value) is MethodType else id(value)))
            return
        self.settings.append((name, type(value)))
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if not isinstance(inside, tuple):
            self.holders.append(inside)
            self.views.append(inside.values() if isinstance(inside, dict) else inside)
        if inside is value and isinstance(inside, dict):  # whose keys may change alone
            self.views.append(inside.keys())
        if isinstance(inside, dict):
            for key, each in inside.items():
                self._note(f"{name}.{key}", each, depth - 1)
        else:
            for each in inside:
                self._note(name, each, depth - 1)


def _inside(value: Any) -> Any:
    """Return the container that a value is, or the attributes of an object; None: it is not looked into."""
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return value
    if isinstance(value, partial):  # transformers makes another one each time that checkpointing is enabled
        return value.func, value.args, value.keywords
    cls = type(value)
    if isinstance(value, (nn.Module, type)) or callable(value) or cls.__module__.partition(".")[0] in _OPAQUE_PACKAGES:
        return None
    held = getattr(value, "__dict__", None)
    return held if isinstance(held, dict) else None
